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

	"github.com/forkd/forkd/internal/image"
	"github.com/forkd/forkd/internal/image/agentbin"
	"github.com/forkd/forkd/internal/vmm/qemu"
	"github.com/forkd/forkd/test/lab"
	"github.com/forkd/forkd/test/lab/guest"
)

// goTestCmd runs tests that need KVM. They are told by their environment: FORKD_VM_TESTS=1, FORKD_E2E_ACCEL=kvm, FORKD_E2E_IMAGES: where images
// are, and FORKD_BIN: the forkd to test.
type goTestCmd struct {
	Where string   `enum:"auto,host,lab" default:"auto" help:"Where to run: ${enum}."`
	Env   []string `short:"e" placeholder:"K=V" help:"A variable for the tests."`
	Put   []string `placeholder:"FILE[:PATH]" help:"Copy a file or a directory in first; ignored on the host."`
	Args  []string `arg:"" passthrough:"" help:"The package, as ./test/e2e, and flags for its test binary, such as -test.run=X."`
}

func (g *goTestCmd) pkg() string { return g.Args[0] }

// Run runs the tests.
func (g *goTestCmd) Run(ctx context.Context, c *cli) error {
	where := g.Where
	if where == "auto" {
		where = "lab"
		if why := hostServes(ctx); why == nil {
			where = "host"
		} else {
			fmt.Fprintf(os.Stderr, "lab: not on this host: %v\n", why)
		}
	}
	binary, err := g.compile(ctx)
	if err != nil {
		return err
	}
	images, err := buildImages(ctx, c.Cache)
	if err != nil {
		return err
	}
	flags := append([]string{"-test.v=test2json"}, g.Args[1:]...)
	name := path.Base(g.pkg()) + " (" + where + ", KVM)"
	if where == "host" {
		return g.onHost(ctx, name, binary, images, flags)
	}
	err = c.with(ctx, images, func(l *lab.Lab) error { return g.inLab(ctx, l, name, binary, images, flags) })
	if errors.Is(err, lab.ErrUnavailable) {
		return printSkip(name, err)
	}
	return err
}

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

// compile makes the test binary.
func (g *goTestCmd) compile(ctx context.Context) (string, error) {
	binary, err := filepath.Abs(filepath.Join("bin", path.Base(g.pkg())+".test"))
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, "go", "test", "-c", "-o", binary, g.pkg())
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("compile the tests of %s: %w", g.pkg(), err)
	}
	return binary, nil
}

// buildImages makes the images that the tests use: in the lab there is no network to build them.
func buildImages(ctx context.Context, cache string) (dir string, err error) {
	agent, err := agentbin.Agent()
	if err != nil {
		return "", err
	}
	dir = filepath.Join(cache, "lab", "images")
	store, err := image.Open(dir, cache, agent)
	if err != nil {
		return "", err
	}
	if _, err := store.Build(ctx, image.BuildSpec{Name: "python", Packages: []string{"python3", "python3-numpy"}}, nil); err != nil {
		return "", err
	}
	_, err = store.Prune(0, func(string) error { return nil })
	return dir, err
}

func (g *goTestCmd) env(images, forkd, cache string) []string {
	return append([]string{"FORKD_VM_TESTS=1", "FORKD_E2E_ACCEL=kvm", "FORKD_E2E_IMAGES=" + images, "FORKD_BIN=" + forkd, "FORKD_CACHE=" + cache}, g.Env...)
}

func (g *goTestCmd) onHost(ctx context.Context, name, binary, images string, flags []string) error {
	forkd, err := filepath.Abs(filepath.Join("bin", "forkd"))
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, binary, flags...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.Dir = g.pkg()
	cmd.Env = append(os.Environ(), g.env(images, forkd, os.Getenv("FORKD_CACHE"))...)
	return asEvents(ctx, name, func(out io.Writer) (int, error) {
		cmd.Stdout, cmd.Stderr = out, os.Stderr
		err := cmd.Run()
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			return exit.ExitCode(), nil
		}
		return 0, err
	})
}

func (g *goTestCmd) inLab(ctx context.Context, l *lab.Lab, name, binary, images string, flags []string) error {
	files := append([]string{"bin/forkd", binary}, g.Put...)
	dir := l.Disk
	if dir == "" {
		dir = guest.WorkDir + "/images"
		files = append(files, images+":"+dir)
	}
	if err := put(ctx, l, files); err != nil {
		return err
	}
	args := append([]string{path.Join(guest.BinDir, path.Base(binary))}, flags...)
	env := g.env(dir, path.Join(guest.BinDir, "forkd"), guest.WorkDir+"/cache")
	return asEvents(ctx, name, func(out io.Writer) (int, error) {
		return l.Run(ctx, lab.Command{Args: args, Env: env, Stdout: out, Stderr: os.Stderr})
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
