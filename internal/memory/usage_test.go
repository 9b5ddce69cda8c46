package memory

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// runMapper maps descriptor 3 privately, reads all of it, writes to some pages, reports, and waits for its input to end.
func runMapper(args []string) error {
	n, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	f := os.NewFile(3, "guest memory")
	info, err := f.Stat()
	if err != nil {
		return err
	}
	b, err := unix.Mmap(3, 0, int(info.Size()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	if err != nil {
		return err
	}
	var sum byte
	for off := 0; off < len(b); off += PageSize {
		sum += b[off]
	}
	for i := range n {
		b[i*PageSize] = sum | 1
	}
	fmt.Println("mapped")
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// startMapper runs a stand-in monitor over f and returns its pid once it has touched its pages.
func startMapper(t *testing.T, f *os.File, touch int) int {
	t.Helper()
	cmd := helperCommand("mapper", strconv.Itoa(touch))
	cmd.ExtraFiles = []*os.File{f}
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stdin.Close()
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	})
	if line, err := bufio.NewReader(stdout).ReadString('\n'); line != "mapped\n" {
		t.Fatalf("the mapper said %q (%v)", line, err)
	}
	return cmd.Process.Pid
}

func TestMeasure(t *testing.T) {
	const pages, touched = 1024, 100
	base := sealed(t, newRAM(t, pages, 1, Extent{0, pages}))
	img, err := NewImage(base)
	if err != nil {
		t.Fatal(err)
	}
	other, err := NewImage(sealed(t, newRAM(t, pages, 2)))
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	pids := []int{startMapper(t, base, touched), startMapper(t, base, touched)}
	for name, given := range map[string]*Image{"by inode": img, "by name": nil, "by name when no inode fits": other} {
		for _, pid := range pids {
			u, err := Measure(pid, given)
			if err != nil {
				t.Fatal(err)
			}
			if want := int64(touched * PageSize / 1024); u.GuestAnonKiB != want {
				t.Errorf("%s: got %d KiB of its own, want %d", name, u.GuestAnonKiB, want)
			}
			// Two processes share what neither wrote to; both wrote to the same pages.
			want := int64((pages-touched)*PageSize/1024/2 + touched*PageSize/1024)
			if u.GuestPSSKiB < want-4 || u.GuestPSSKiB > want+4 {
				t.Errorf("%s: got a share of %d KiB, want %d", name, u.GuestPSSKiB, want)
			}
			if whole := int64(pages * PageSize / 1024); u.RSSKiB < whole || u.PSSKiB < u.GuestPSSKiB || u.PSSKiB >= u.RSSKiB {
				t.Errorf("%s: got %+v: the process has at least %d KiB resident, and its share is less", name, u, whole)
			}
		}
	}
	img.Close()
}

func TestMeasureNoProcess(t *testing.T) {
	if _, err := Measure(1<<22+1, nil); err == nil || !strings.Contains(err.Error(), "process 4194305") {
		t.Errorf("got %v, want an error that names the process", err)
	}
}

const smaps = `7f0000000000-7f0000400000 rw-p 00000000 00:01 77                         /memfd:forkd-base (deleted)
Size:               4096 kB
Rss:                 100 kB
Pss:                  40 kB
Anonymous:            12 kB
Swap:                  4 kB
VmFlags: rd wr mr mw me sd
7f0000400000-7f0000500000 rw-p 00000000 00:01 78                         /memfd:forkd-layer (deleted)
Rss:                  10 kB
Pss:                   5 kB
Anonymous:             1 kB
7f0000600000-7f0000700000 rw-p 00000000 08:01 77                         /usr/bin/qemu with spaces
Rss:                1000 kB
Pss:                 900 kB
Anonymous:           800 kB
7f0000800000-7f0000900000 rw-p 00000000 00:00 0
Rss:                   7 kB
Pss:                   7 kB
Anonymous:             7 kB
`

func TestParseSmaps(t *testing.T) {
	for name, c := range map[string]struct {
		wanted map[inode]bool
		want   Usage
	}{
		"by inode, which needs the device too": {map[inode]bool{{0, 1, 77}: true}, Usage{GuestAnonKiB: 16, GuestSharedKiB: 88, GuestPSSKiB: 40, PSSKiB: 952, RSSKiB: 1117}},
		"by name":                              {nil, Usage{GuestAnonKiB: 17, GuestSharedKiB: 97, GuestPSSKiB: 45, PSSKiB: 952, RSSKiB: 1117}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := parseSmaps(strings.NewReader(smaps), c.wanted)
			if err != nil || got != c.want {
				t.Errorf("got %+v (%v), want %+v", got, err, c.want)
			}
		})
	}
}
