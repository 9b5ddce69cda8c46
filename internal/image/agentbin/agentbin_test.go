package agentbin

import (
	"bytes"
	"errors"
	"testing"
)

func TestAgent(t *testing.T) {
	agent, err := Agent()
	if errors.Is(err, ErrNotBuilt) {
		t.Skip("no agent in this build: run make build")
	}
	if err != nil {
		t.Fatalf("Agent() error = %v", err)
	}
	if !bytes.HasPrefix(agent, []byte("\x7fELF")) {
		t.Errorf("Agent() starts with %q, want an ELF file", agent[:min(4, len(agent))])
	}
}
