package sandbox

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"slices"
	"time"

	"github.com/forkd/forkd/internal/guest/agentproto"
)

// entropyBytes is what a child gets of the host's randomness: twice the seed of the kernel's generator.
const entropyBytes = 64

// newID returns an id that nothing else has: a prefix and 64 random bits.
func newID(prefix string) string {
	return prefix + randomHex(8)
}

func randomHex(bytes int) string {
	b := make([]byte, bytes)
	rand.Read(b) // never fails: crypto/rand ends the process instead
	return hex.EncodeToString(b)
}

// newIdentity makes a machine an individual. The clock is read here, so call it as late as possible.
func newIdentity(id string, env []string, hooks bool) agentproto.Identity {
	entropy := make([]byte, entropyBytes)
	rand.Read(entropy)
	return agentproto.Identity{
		InstanceID: id,
		Hostname:   id,
		MachineID:  randomHex(16),
		Entropy:    entropy,
		Env:        env,
		RunHooks:   hooks,
		UnixNano:   time.Now().UnixNano(),
	}
}

// The clock in an identity is as old as its way to the guest is long, and that is long on a host that is busy. A guest that may be
// further behind than clockSlack is told again, by a way that has become shorter meanwhile.
const (
	clockSlack = 500 * time.Millisecond
	clockTries = 3
)

// identifier is the agent's client.
type identifier interface {
	Identify(context.Context, agentproto.Identity) (agentproto.IdentityAck, error)
}

// identify gives a guest its identity, and the time until it is right; one that can't be told the time is an error. Hooks run once.
func identify(ctx context.Context, agent identifier, id agentproto.Identity) error {
	for range clockTries {
		ack, err := agent.Identify(ctx, id)
		if err != nil {
			return err
		}
		// How far the guest is behind, and what the answer took; wall clock against wall clock.
		if time.Since(time.Unix(0, ack.UnixNano)) < clockSlack {
			return nil
		}
		id.RunHooks = false
		id.UnixNano = time.Now().UnixNano()
	}
	return errLateClock
}

var errLateClock = fmt.Errorf("its clock is more than %v behind whenever it is set", clockSlack)

// environ returns base (K=V, sorted) with the variables of over set on top, sorted.
func environ(base []string, over map[string]string) []string {
	env := make([]string, 0, len(base)+len(over))
	for _, kv := range base {
		if _, replaced := over[envName(kv)]; !replaced {
			env = append(env, kv)
		}
	}
	for k, v := range over {
		env = append(env, k+"="+v)
	}
	slices.Sort(env)
	return env
}

func envName(kv string) string {
	for i := range len(kv) {
		if kv[i] == '=' {
			return kv[:i]
		}
	}
	return kv
}
