package sandbox

import (
	"crypto/rand"
	"encoding/hex"
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
