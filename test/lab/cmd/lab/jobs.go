package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"

	"github.com/forkd/forkd/internal/vmm/qemu"
	"github.com/forkd/forkd/test/lab"
	"github.com/forkd/forkd/test/lab/guest"
)

const (
	firecrackerEngine = "firecracker"
	jailer            = "jailer" // the name it is given by
)

// job is a test binary to be run once.
type job struct {
	pkg    string
	what   string // in the name that the results get; may be empty
	engine string // empty: the tests have nothing to do with one
	jailed bool   // each Firecracker is started through its jailer
	flags  []string
	env    []string
}

// monitors are files that are not forkd's own.
type monitors struct {
	Firecracker string `env:"FORKD_FIRECRACKER" default:"firecracker" placeholder:"FILE" help:"The Firecracker binary, unmodified, 1.12 or newer."`
	Jailer      string `env:"FORKD_JAILER" placeholder:"FILE" help:"Its jailer, of the same release, for tests that start each Firecracker through it."`
}

// jail tells whether an engine's machines are started through the jailer.
func (m monitors) jail(engine string) bool { return m.Jailer != "" && engine == firecrackerEngine }

// title is the name of a job's results.
func (j job) title(where string) string {
	var words []string
	for _, word := range []string{j.engine, j.what} {
		if word != "" {
			words = append(words, word)
		}
	}
	return fmt.Sprintf("%s (%s, %s)", path.Clean(j.pkg), where, strings.Join(words, ", "))
}

// binary is where a package's compiled tests are.
func binary(pkg string) string { return filepath.Join("bin", path.Base(pkg)+".test") }

// hostServes says why tests can't run on this host itself.
func hostServes(ctx context.Context) error {
	if os.Geteuid() != 0 {
		return errors.New("they need root")
	}
	b, err := os.ReadFile("/sys/fs/cgroup/cgroup.controllers")
	if err != nil || !strings.Contains(string(b), "memory") {
		return errors.New("it has no cgroup v2 with all controllers")
	}
	return qemu.KVMWorks(ctx, qemu.DefaultBinary)
}

// compile makes the test binaries.
func compile(ctx context.Context, jobs []job) error {
	done := map[string]bool{}
	for _, j := range jobs {
		if done[j.pkg] {
			continue
		}
		done[j.pkg] = true
		cmd := exec.CommandContext(ctx, "go", "test", "-c", "-ldflags=-s -w", "-o", binary(j.pkg), j.pkg)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("compile the tests of %s: %w", j.pkg, err)
		}
	}
	return nil
}

// runJobs runs them all, on the host or in one lab, and prints what go test -json prints. If the lab can't be had they are skipped when skip
// is that very error.
func (c *cli) runJobs(ctx context.Context, where string, with monitors, jobs []job, skip error) error {
	if where == "lab" {
		if err := lab.Available(ctx, lab.Options{Cache: c.Cache, MemMiB: c.Mem}); err != nil {
			return c.skipJobs(where, jobs, skip, err)
		}
	}
	if err := compile(ctx, jobs); err != nil {
		return err
	}
	images, err := buildImages(ctx, c.Cache)
	if err != nil {
		return err
	}
	given := map[string]string{"images": images, "forkd": filepath.Join("bin", "forkd"), "systemd": filepath.Join("packaging", "systemd")}
	for _, j := range jobs {
		given[filepath.Base(binary(j.pkg))] = binary(j.pkg)
		if j.engine == firecrackerEngine {
			if given[firecrackerEngine], err = exec.LookPath(with.Firecracker); err != nil {
				return fmt.Errorf("no Firecracker at hand (%w): FORKD_FIRECRACKER=FILE or --firecracker FILE names one", err)
			}
		}
		if j.jailed {
			given[jailer] = with.Jailer
		}
	}
	if where == "host" {
		return eachJob(jobs, func(j job) error { return j.onHost(ctx, given) })
	}
	err = c.withGiven(ctx, given, func(l *lab.Lab, dir string) error {
		return eachJob(jobs, func(j job) error { return j.inLab(ctx, l, dir) })
	})
	return c.skipJobs(where, jobs, skip, err)
}

// skipJobs says that nothing was run, if err is the reason for that.
func (c *cli) skipJobs(where string, jobs []job, skip, err error) error {
	if skip == nil || !errors.Is(err, skip) {
		return err
	}
	for _, j := range jobs {
		if perr := printSkip(j.title(where), err); perr != nil {
			return perr
		}
	}
	return nil
}

// eachJob runs all, also after one that failed.
func eachJob(jobs []job, run func(job) error) (err error) {
	for _, j := range jobs {
		jerr := run(j)
		var code exitCode
		if jerr != nil && !errors.As(jerr, &code) {
			return jerr
		}
		if jerr != nil {
			err = jerr
		}
	}
	return err
}

// environ is what the tests are told of where things are: below dir, or where given has them.
func (j job) environ(at func(name string) string) []string {
	env := []string{"FORKD_VM_TESTS=1", "FORKD_E2E_IMAGES=" + at("images"), "FORKD_BIN=" + at("forkd"), "FORKD_E2E_ENGINE=" + j.engine}
	if j.engine == firecrackerEngine {
		env = append(env, "FORKD_FIRECRACKER="+at(firecrackerEngine))
	}
	if j.jailed {
		env = append(env, "FORKD_JAILER="+at(jailer))
	}
	return env
}

func (j job) onHost(ctx context.Context, given map[string]string) error {
	abs := func(path string) string {
		path, _ = filepath.Abs(path) // there is a working directory
		return path
	}
	cmd := exec.CommandContext(ctx, abs(binary(j.pkg)), append([]string{"-test.v=test2json"}, j.flags...)...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.Dir = j.pkg
	cmd.Env = append(append(os.Environ(), j.environ(func(name string) string { return abs(given[name]) })...), j.env...)
	return asEvents(ctx, j.title("host"), func(out io.Writer) (int, error) {
		cmd.Stdout, cmd.Stderr = out, os.Stderr
		err := cmd.Run()
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			return exit.ExitCode(), nil
		}
		return 0, err
	})
}

// inLab runs the tests in the lab, with fewer of everything and with patience. There systemd may be given services to run.
func (j job) inLab(ctx context.Context, l *lab.Lab, dir string) error {
	at := func(name string) string { return path.Join(dir, name) }
	args := append([]string{at(path.Base(binary(j.pkg))), "-test.v=test2json"}, j.flags...)
	env := append(j.environ(at), "FORKD_CACHE="+guest.WorkDir+"/cache", "FORKD_E2E_SMALL=1", "FORKD_E2E_PATIENCE=4", "FORKD_E2E_SYSTEMD="+at("systemd"))
	return asEvents(ctx, j.title("lab"), func(out io.Writer) (int, error) {
		return l.Run(ctx, lab.Command{Args: args, Env: append(env, j.env...), Stdout: out, Stderr: os.Stderr})
	})
}

// asEvents turns what a test binary prints into the events of go test -json, on our standard output.
func asEvents(ctx context.Context, name string, tests func(io.Writer) (int, error)) error {
	convert := exec.CommandContext(ctx, "go", "tool", "test2json", "-t", "-p", name)
	in, err := convert.StdinPipe()
	if err != nil {
		return err
	}
	convert.Stdout, convert.Stderr = os.Stdout, os.Stderr
	if err := convert.Start(); err != nil {
		return fmt.Errorf("test2json: %w", err)
	}
	code, err := tests(in)
	if err != nil || code != 0 {
		fmt.Fprintf(in, "\nFAIL\n") // one that was killed does not say so itself
	}
	in.Close()
	if werr := convert.Wait(); err == nil && werr != nil {
		err = fmt.Errorf("test2json: %w", werr)
	}
	if err == nil && code != 0 {
		err = exitCode(code)
	}
	return err
}

// printSkip is a skipped test, with its reason, in the form of go test -json.
func printSkip(name string, why error) error {
	enc := json.NewEncoder(os.Stdout)
	for _, event := range []map[string]any{
		{"Action": "output", "Package": name, "Test": "all", "Output": why.Error() + "\n"},
		{"Action": "skip", "Package": name, "Test": "all"},
	} {
		if err := enc.Encode(event); err != nil {
			return err
		}
	}
	return nil
}
