package sandbox

import (
	"context"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/forkd/forkd/internal/guest/agentproto"
)

// Bounds of secrets.
const (
	maxSecrets     = 64
	maxSecretBytes = 64 << 10 // of one
	maxSecretEnv   = 96 << 10 // of all, when they are in environments
)

// secretsDir is where a guest finds its secrets, each a file of that name: a tmpfs, so only in its memory.
const secretsDir = "/run/forkd/secrets"

// inheritedSecrets stands in for the names of secrets that came with a snapshot.
const inheritedSecrets = "(of its snapshot)"

var secretPattern = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,63}$`)

// secretsInEnv is the file that tells the agent to have secrets in environments too.
const secretsInEnv = ".env"

// agentWithoutSecretEnv is the version of agents that don't know it.
const agentWithoutSecretEnv = "0.1.0"

// checkSecrets says nothing of values, not even in errors.
func checkSecrets(secrets map[string]string, inEnv bool) error {
	total := 0
	if len(secrets) > maxSecrets {
		return invalid("put them into one", "%d secrets, the limit is %d", len(secrets), maxSecrets)
	}
	for name, value := range secrets {
		if !secretPattern.MatchString(name) {
			return invalid("use letters, digits and _, at most 64, no digit first", "a secret can't have the name %.80q", name)
		}
		if len(value) > maxSecretBytes {
			return invalid("hand it over in another way", "secret %s has %d bytes, the limit is %d", name, len(value), maxSecretBytes)
		}
		if inEnv && strings.Contains(value, "\x00") {
			return invalid("hand it over as a file only", "secret %s has a NUL byte in it, which an environment can't have", name)
		}
		total += len(value)
	}
	switch {
	case inEnv && len(secrets) == 0:
		return invalid("leave secret_env out", "there are no secrets to have in environments")
	case inEnv && total > maxSecretEnv:
		return invalid("hand them over as files only", "the secrets have %d bytes, the limit for environments is %d", total, maxSecretEnv)
	}
	return nil
}

// giveSecrets writes secrets into a guest that has its identity and nobody's else, before anybody is told of it. They are kept nowhere else.
func giveSecrets(ctx context.Context, c *child, req ForkRequest) error {
	secrets := req.Secrets
	if req.SecretEnv {
		pong, err := c.agent.Ping(ctx)
		if err != nil {
			return newError(CodeIdentityFailed, err, "", "secrets could not be handed over")
		}
		if pong.Version == agentWithoutSecretEnv {
			return newError(CodeInvalidState, nil, "make the image and the snapshot anew, or hand them over as files only",
				"the agent in the snapshot is too old to have secrets in environments")
		}
		secrets = maps.Clone(secrets)
		secrets[secretsInEnv] = ""
	}
	for _, name := range slices.Sorted(maps.Keys(secrets)) {
		file := secretsDir + "/" + name // a name needs no quotes
		res, err := c.agent.Exec(ctx, agentproto.ExecRequest{TimeoutMS: millis(answerGrace), Stdin: []byte(secrets[name]),
			Args: []string{"/bin/sh", "-c", "umask 077 && mkdir -p " + secretsDir + " && cat > " + file + " && chmod 400 " + file}})
		if err != nil {
			return newError(CodeIdentityFailed, err, "", "secret %s could not be handed over", name)
		}
		if res.ExitCode != 0 || res.TimedOut {
			// What the guest says of it is left out: it knows the value.
			return newError(CodeIdentityFailed, fmt.Errorf("exit code %d", res.ExitCode), "the guest needs a /bin/sh, and room below /run", "secret %s could not be handed over", name)
		}
	}
	return nil
}

// names of the secrets that a sandbox of f will hold, for its record.
func secretNames(f *frozen, given map[string]string) []string {
	names := slices.Sorted(maps.Keys(given))
	if f.secrets {
		names = append(names, inheritedSecrets)
	}
	return names
}

// mayKeep refuses to write down what a sandbox holds in its memory, unless that was asked for. b's own secrets never change.
func (b *box) mayKeep(asked bool) error {
	if b.holdsSecrets() && !asked {
		return newError(CodeHoldsSecrets, nil, "ask for it with --include-secrets (include_secrets), if they may be in what is made of it",
			"sandbox %s holds secrets: a copy of its memory would have them", b.id)
	}
	return nil
}

// holdsSecrets says whether secrets were given to the sandbox, or came with its snapshot.
func (b *box) holdsSecrets() bool { return len(b.rec.Secrets) > 0 }
