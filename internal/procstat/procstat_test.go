package procstat

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"testing"

	"github.com/google/go-cmp/cmp"
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
			if u.Net != nil {
				t.Errorf("this process has a network of its own: %+v", u.Net)
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

func TestParseDev(t *testing.T) {
	const dev = `Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:    1000      10    0    0    0     0          0         0     1000      10    0    0    0     0       0          0
  tap0:     111       1    0    0    0     0          0         0      222       2    0    0    0     0       0          0
 veth0:    5555       1    0    0    0     0          0         0     6666       2    0    0    0     0       0          0
`
	got, err := parseDev([]byte(dev))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(&Net{ReceivedBytes: 222, SentBytes: 111}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if none, err := parseDev([]byte("    lo: 1 2 3 4 5 6 7 8 9 10\n")); err != nil || none != nil {
		t.Errorf("without a tap: %+v, %v", none, err)
	}
}
