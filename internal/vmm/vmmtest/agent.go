package vmmtest

import (
	"context"
	"crypto/rand"
	"fmt"
	"strings"

	"github.com/forkd/forkd/internal/guest/agentclient"
	"github.com/forkd/forkd/internal/guest/agentproto"
)

// agent is the suite's connection to a guest's agent.
type agent struct{ *agentclient.Client }

// newAgent returns an agent; resync says that another process may have used the port before.
func newAgent(dial agentclient.Dialer, resync bool) agent {
	return agent{agentclient.New(dial, agentclient.Options{Resync: resync})}
}

func (a agent) close() { _ = a.Close() }

func (a agent) ping(ctx context.Context) error {
	_, err := a.Ping(ctx)
	return err
}

func (a agent) identify(ctx context.Context, name string) error {
	_, err := a.Identify(ctx, agentproto.Identity{InstanceID: name, Hostname: name, Entropy: entropy()})
	return err
}

func entropy() []byte {
	b := make([]byte, agentproto.MinEntropy)
	rand.Read(b)
	return b
}

// exec runs a command that must succeed and returns what it printed, without the last newline.
func (a agent) exec(ctx context.Context, args []string) (string, error) {
	res, err := a.Exec(ctx, agentproto.ExecRequest{Args: args})
	if err == nil && res.ExitCode != 0 {
		err = fmt.Errorf("%q: exit code %d: %s", args, res.ExitCode, res.Stderr)
	}
	return strings.TrimSuffix(string(res.Stdout), "\n"), err
}
