package procstat

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"testing"
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
