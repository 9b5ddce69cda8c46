package sandbox

import (
	"cmp"
	"regexp"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/forkd/forkd/internal/snapshot"
)

// Bounds of requests.
const (
	maxEnvBytes      = 128 << 10 // all names and values
	maxEnvVars       = 256       // of a snapshot: what its manifest takes
	maxMetadata      = 64        // entries
	maxMetadataBytes = 16 << 10  // all keys and values
	maxWarmUps       = 64
	maxCodeBytes     = 64 << 10
)

var tagPattern = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)

func checkTag(tag string) error {
	if tagPattern.MatchString(tag) {
		return nil
	}
	return newError(CodeInvalidTag, nil, "use 1 to 64 letters, digits, - and _", "tag %.80q is not valid", tag)
}

func invalid(hint, format string, args ...any) error {
	return newError(CodeInvalidArgument, nil, hint, format, args...)
}

func checkEnv(env map[string]string) error {
	total := 0
	for k, v := range env {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) || !utf8.ValidString(k) || !utf8.ValidString(v) {
			return invalid("a name is not empty and has no =, neither has a NUL byte, both are UTF-8", "environment variable %.80q is not valid", k)
		}
		total += len(k) + len(v) + 2
	}
	if total > maxEnvBytes {
		return invalid("write large values to a file in the sandbox", "the environment has %d bytes, the limit is %d", total, maxEnvBytes)
	}
	return nil
}

func checkMetadata(md map[string]string) error {
	total := 0
	for k, v := range md {
		if k == "" || !utf8.ValidString(k) || !utf8.ValidString(v) {
			return invalid("a key is not empty, both are UTF-8", "metadata %.80q is not valid", k)
		}
		total += len(k) + len(v)
	}
	if len(md) > maxMetadata || total > maxMetadataBytes {
		return invalid("keep it to what identifies the sandbox", "metadata has %d entries and %d bytes, the limits are %d and %d",
			len(md), total, maxMetadata, maxMetadataBytes)
	}
	return nil
}

func (r ForkRequest) check() error {
	if err := checkTag(r.Tag); err != nil {
		return err
	}
	switch {
	case r.N < 1 || r.N > MaxForks:
		return invalid("ask for 1 to 1000 children", "n is %d", r.N)
	case r.Timeout < 0:
		return invalid("0 is for none", "timeout of %v is negative", r.Timeout)
	case r.Path != PathAny && r.Path != PathCold && r.Path != PathPool:
		return invalid(`use "cold", "pool", or nothing for any`, "path %.80q is not known", r.Path)
	}
	if err := checkSecrets(r.Secrets, r.SecretEnv); err != nil {
		return err
	}
	if len(r.Secrets) > 0 && r.AutoSuspend > 0 {
		return invalid("suspend it by a request that says so", "a sandbox with secrets can't be suspended by itself: they would be written to disk")
	}
	if err := cmp.Or(checkLimits(r.Limits), checkEnv(r.Env)); err != nil {
		return err
	}
	return cmp.Or(checkMetadata(r.Metadata), r.checkName())
}

func (r ForkRequest) checkName() error {
	switch {
	case r.AutoSuspend < 0:
		return invalid("0 is for never", "auto-suspend after %v is negative", r.AutoSuspend)
	case r.AutoSuspend > 0 && r.AutoSuspend < minAutoSuspend:
		return invalid("", "auto-suspend after %v: choose at least %v", r.AutoSuspend, minAutoSuspend)
	case r.Name == "":
		return nil
	case !tagPattern.MatchString(r.Name):
		return invalid("use 1 to 64 letters, digits, - and _", "name %.80q is not valid", r.Name)
	case r.N != 1:
		return invalid("leave the name out, or ask for one child", "%d sandboxes can't have one name", r.N)
	}
	return nil
}

// minAutoSuspend keeps a sandbox from being suspended while its owner thinks.
const minAutoSuspend = 100 * time.Millisecond

// fits refuses a machine that this daemon would not make: one from a pack may say anything.
func (l Limits) fits(man snapshot.Manifest) error {
	switch shape := man.Shape; {
	case shape.MemMiB < l.MinMemMiB || shape.MemMiB > l.MaxMemMiB:
		return newError(CodeSnapshotIncompatible, nil, "make it with less or more memory", "snapshot %s has %d MiB of memory: from %d to %d are possible here", man.ID, shape.MemMiB, l.MinMemMiB, l.MaxMemMiB)
	case shape.VCPUs < 1 || shape.VCPUs > l.MaxVCPUs:
		return newError(CodeSnapshotIncompatible, nil, "make it with fewer", "snapshot %s has %d vCPUs: from 1 to %d are possible here", man.ID, shape.VCPUs, l.MaxVCPUs)
	}
	return nil
}

func (r SnapshotRequest) check(l Limits) error {
	if err := checkTag(r.Tag); err != nil {
		return err
	}
	switch {
	case r.Image == "":
		return invalid("`forkd image ls` lists them", "no image is given for snapshot %s", r.Tag)
	case r.MemMiB < 0 || r.MemMiB > l.MaxMemMiB || r.MemMiB > 0 && r.MemMiB < l.MinMemMiB:
		return invalid("", "memory of %d MiB: choose %d to %d", r.MemMiB, l.MinMemMiB, l.MaxMemMiB)
	case r.VCPUs < 0 || r.VCPUs > l.MaxVCPUs:
		return invalid("", "%d vCPUs: choose 1 to %d", r.VCPUs, l.MaxVCPUs)
	case r.Timeout < 0:
		return invalid("0 is for the default", "timeout of %v is negative", r.Timeout)
	case len(r.Probe) > maxCodeBytes:
		return invalid("", "the probe has %d bytes, the limit is %d", len(r.Probe), maxCodeBytes)
	case len(r.WarmUp) > maxWarmUps:
		return invalid("put them into a script", "%d warm-ups, the limit is %d", len(r.WarmUp), maxWarmUps)
	case len(r.Env) > maxEnvVars:
		return invalid("", "%d environment variables, the limit is %d", len(r.Env), maxEnvVars)
	}
	if err := checkPoolSize(r.PoolSize, l); err != nil {
		return err
	}
	for i, w := range r.WarmUp {
		if err := w.check(i); err != nil {
			return err
		}
	}
	return checkEnv(r.Env)
}

func (w WarmUp) check(i int) error {
	switch {
	case w.Kind != WarmUpExec && w.Kind != WarmUpEval:
		return invalid(`use "exec" or "eval"`, "warm-up %d is of kind %.80q", i+1, w.Kind)
	case strings.TrimSpace(w.Code) == "":
		return invalid("", "warm-up %d is empty", i+1)
	case len(w.Code) > maxCodeBytes:
		return invalid("put it into a script", "warm-up %d has %d bytes, the limit is %d", i+1, len(w.Code), maxCodeBytes)
	case strings.ContainsRune(w.Code, 0) || !utf8.ValidString(w.Code):
		return invalid("", "warm-up %d is not plain text", i+1)
	}
	return nil
}

func checkPoolSize(size int, l Limits) error {
	if size < 0 || size > l.MaxPoolSize {
		return invalid("", "pool size of %d: choose 0 to %d", size, l.MaxPoolSize)
	}
	return nil
}

// recipe is what the manifest keeps of the request.
func (r SnapshotRequest) recipe() snapshot.Recipe {
	out := snapshot.Recipe{Image: r.Image, Probe: r.Probe, Env: environ(nil, r.Env), Limits: r.Limits}
	for _, w := range r.WarmUp {
		out.WarmUp = append(out.WarmUp, snapshot.WarmUp{Kind: string(w.Kind), Code: w.Code})
	}
	return out
}
