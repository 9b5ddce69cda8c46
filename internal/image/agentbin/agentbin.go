// Package agentbin carries the guest's agent inside the host binary: a static executable that `make build` puts beside this file
// before it builds the host binary. It knows nothing about what the agent does.
package agentbin

import (
	"embed"
	"errors"
	"fmt"
	"io/fs"
)

// The pattern also matches a committed text file, so that a clone in which nothing was built yet still compiles.
//
//go:embed forkd-agent*
var files embed.FS

// ErrNotBuilt means that this binary was built without the agent.
var ErrNotBuilt = errors.New("this forkd was built without its guest agent: run `make build` and use bin/forkd")

// Agent returns the agent's executable, or ErrNotBuilt.
func Agent() ([]byte, error) {
	agent, err := files.ReadFile("forkd-agent")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, ErrNotBuilt
	}
	if err != nil {
		return nil, fmt.Errorf("read embedded agent: %w", err)
	}
	return agent, nil
}
