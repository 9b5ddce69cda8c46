package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func sh(script string) command {
	return command{name: "sh", args: []string{"-c", script}, timeout: time.Minute}
}

func TestRunReportsLines(t *testing.T) {
	c := sh("echo out; printf 'one\\rtwo\\n\\nlast' >&2")
	var lines []string
	c.line = func(l string) { lines = append(lines, l) }
	out, err := osRunner{}.run(t.Context(), c)
	if err != nil || string(out) != "out\n" {
		t.Errorf("run() = %q, %v, want out", out, err)
	}
	if d := cmp.Diff(lines, []string{"one", "two"}); d != "" { // an unfinished line is only for an error message
		t.Errorf("lines (-got +want):\n%s", d)
	}
}

func TestRunFails(t *testing.T) {
	short := sh("exec sleep 60")
	short.timeout = 50 * time.Millisecond
	tests := []struct {
		name    string
		command command
		want    []string
	}{
		{"exit status and the last lines", sh("for i in $(seq 100); do echo line $i >&2; done; printf cut >&2; exit 3"),
			[]string{"sh failed (exit status 3)", "line 100", "cut"}},
		{"missing program", command{name: "mkfs.erofs.missing", timeout: time.Minute}, []string{"not installed", "apt-get install"}},
		{"time limit", short, []string{"sh: took longer than 50ms"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := osRunner{}.run(t.Context(), tt.command)
			if err == nil {
				t.Fatal("run(): no error")
			}
			for _, want := range tt.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("run() error = %q, want %q in it", err, want)
				}
			}
			if strings.Contains(err.Error(), "line 1\n") {
				t.Errorf("run() error has all lines: %q", err)
			}
		})
	}
}

func TestRunCancelKillsAll(t *testing.T) {
	for _, isolated := range []bool{false, true} {
		t.Run(fmt.Sprintf("isolated %v", isolated), func(t *testing.T) {
			if isolated {
				needRoot(t)
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			mark := fmt.Sprintf("3%d", os.Getpid()) // seconds nobody else sleeps
			script := "sleep " + mark + " & echo ready >&2; wait"
			dir := t.TempDir()
			if isolated {
				// A process that left the group, and a mount: only the namespaces hold them.
				script = "mount -t tmpfs none " + dir + " && setsid " + script
			}
			c := sh(script)
			c.isolated = isolated
			c.line = func(string) { cancel() }
			if _, err := (osRunner{}).run(ctx, c); !errors.Is(err, context.Canceled) {
				t.Fatalf("run() error = %v, want %v", err, context.Canceled)
			}
			if left := processes(t, mark); len(left) > 0 {
				t.Errorf("still running: %v", left)
			}
			if mounts, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(mounts), dir) {
				t.Errorf("a mount was left, %v", err)
			}
		})
	}
}

// processes lists those with a word in their command line. Zombies have none.
func processes(t *testing.T, word string) []string {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, f := range files {
		raw, err := os.ReadFile(f)
		if err != nil {
			continue // ended meanwhile
		}
		if args := strings.Split(string(raw), "\x00"); len(args) > 1 && args[1] == word {
			found = append(found, f)
		}
	}
	return found
}

// TestRunDiesWithParent kills a process that runs a command: the command must not go on alone.
func TestRunDiesWithParent(t *testing.T) {
	if mark := os.Getenv("FORKD_TEST_RUN_MARK"); mark != "" {
		c := sh("sleep " + mark + " & echo ready >&2; wait")
		c.isolated = true
		c.line = func(string) { fmt.Println("ready") }
		osRunner{}.run(context.Background(), c)
		return
	}
	needRoot(t)
	mark := fmt.Sprintf("4%d", os.Getpid())
	cmd := exec.Command(os.Args[0], "-test.run=^TestRunDiesWithParent$")
	cmd.Env = append(os.Environ(), "FORKD_TEST_RUN_MARK="+mark)
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := stdout.Read(make([]byte, 5)); err != nil {
		t.Fatal(err)
	}
	if len(processes(t, mark)) != 1 {
		t.Errorf("processes %v, want the command's", processes(t, mark))
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	cmd.Wait()
	deadline := time.Now().Add(10 * time.Second)
	for len(processes(t, mark)) > 0 {
		if time.Now().After(deadline) {
			t.Fatalf("still running: %v", processes(t, mark))
		}
		time.Sleep(10 * time.Millisecond)
	}
}
