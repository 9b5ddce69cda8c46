package procstat

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

func TestRead(t *testing.T) {
	before, err := Read(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	for range 20_000_000 { // more than a tick of the counter, however fast the processor
		if u, err := Read(os.Getpid()); err != nil || u.CPU > before.CPU {
			if err != nil {
				t.Fatal(err)
			}
			break
		}
	}
	after, err := Read(os.Getpid())
	if err != nil || after.CPU <= before.CPU {
		t.Errorf("CPU time = %v after %v, %v", after.CPU, before.CPU, err)
	}
	cmd := exec.Command("true")
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	if _, err := Read(cmd.Process.Pid); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("of a process that is gone: %v, want fs.ErrNotExist", err)
	}
}

// TestParseStat: a name may look like the rest of the line.
func TestParseStat(t *testing.T) {
	rest := "S 7 7 7 0 -1 4194560 1 0 0 0 12 30 0 0 20 0 1 0 123456 8192 200 18446744073709551615"
	for name, line := range map[string]string{"plain": "42 (sh) " + rest, "odd": "42 (a) Z 9 (b) c) " + rest} {
		got, err := parseStat([]byte(line))
		if want := (Stat{State: 'S', Parent: 7, CPU: 420 * time.Millisecond, StartTicks: 123456}); err != nil || got != want {
			t.Errorf("%s: %+v, %v, want %+v", name, got, err, want)
		}
	}
	for _, line := range []string{"", "42", "42 (sh)", "42 (sh) S 7", strings.Replace("42 (sh) "+rest, "123456", "x", 1)} {
		if got, err := parseStat([]byte(line)); err == nil {
			t.Errorf("%q: %+v, want an error", line, got)
		}
	}
	cmd := exec.Command("true")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for {
		s, err := ReadStat(cmd.Process.Pid)
		if err != nil || s.Parent != os.Getpid() || s.StartTicks == 0 {
			t.Fatalf("%+v, %v", s, err)
		}
		if s.Ended() {
			break
		}
		time.Sleep(time.Millisecond)
	}
	_ = cmd.Wait()
	if _, err := ReadStat(cmd.Process.Pid); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("of a process that is gone: %v, want fs.ErrNotExist", err)
	}
	if s, err := ReadThread(os.Getpid(), os.Getpid()); err != nil || s.Ended() {
		t.Errorf("of our own thread: %+v, %v", s, err)
	}
}
