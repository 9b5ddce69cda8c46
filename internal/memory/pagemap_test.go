package memory

import (
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/vmm"
)

// mapHere maps an image's base privately into this process and returns it with its map.
func mapHere(t testing.TB, img *Image) ([]byte, *process, *guestMap) {
	t.Helper()
	mem, err := unix.Mmap(int(img.Base().Fd()), 0, int(img.Bytes()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(mem) }) // twice is harmless
	ticks, err := startTicks(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	p, err := openProcess(processHere(ticks))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.close)
	g, err := readGuestMap(p, img)
	if err != nil {
		t.Fatal(err)
	}
	return mem, p, g
}

func processHere(ticks uint64) vmm.Process { return vmm.Process{PID: os.Getpid(), StartTicks: ticks} }

// uffdHere makes a userfaultfd of this process.
func uffdHere(t testing.TB, p *process) *UFFD {
	t.Helper()
	dev, err := OpenUFFD()
	if err != nil {
		t.Skip(err)
	}
	defer dev.Close()
	fd, _, errno := unix.Syscall(unix.SYS_IOCTL, dev.Fd(), userfaultfdNew, unix.O_CLOEXEC|unix.O_NONBLOCK)
	if errno != 0 {
		t.Fatal(errno)
	}
	u := &UFFD{id: p.Process, fd: int(fd)}
	t.Cleanup(func() { u.Close() })
	if err := negotiate(u.fd); err != nil {
		t.Fatal(err)
	}
	return u
}

func owned(t *testing.T, p *process, g *guestMap, noScan bool) []Extent {
	t.Helper()
	m, err := openPagemap(p)
	if err != nil {
		t.Fatal(err)
	}
	defer m.close()
	m.noScan = noScan
	set := newBitset(g.pages())
	if err := m.owned(g, Extent{0, g.pages()}, set.setAll); err != nil {
		t.Fatal(err)
	}
	return set.extents()
}

func TestOwnedPages(t *testing.T) {
	needRoot(t)
	const pages = 20_000 // more than one read of the page map takes
	img := base(t, pages, 0)
	mem, p, g := mapHere(t, img)
	var want []Extent
	rnd := rand.New(rand.NewPCG(1, 2))
	for page := uint64(0); page < pages; {
		switch rnd.IntN(3) {
		case 0: // written
			mem[page*PageSize]++
			want = append(want, Extent{page, 1})
		case 1: // read
			sum += mem[page*PageSize]
		}
		page += 1 + uint64(rnd.IntN(40)*rnd.IntN(2))
	}
	want = Normalize(want)
	check := func(when string) {
		t.Helper()
		for _, noScan := range []bool{false, true} {
			if diff := cmp.Diff(want, owned(t, p, g, noScan)); diff != "" {
				t.Errorf("%s, without scan: %t (-want +got):\n%s", when, noScan, diff)
			}
		}
	}
	check("before protection")

	u := uffdHere(t, p)
	run := g.runs[0]
	if err := u.register(run.Addr, uint64(run.Bytes())); err != nil {
		t.Fatal(err)
	}
	if err := u.writeProtect(run.Addr, uint64(run.Bytes()), true); err != nil {
		t.Fatal(err)
	}
	check("protected: pages never touched have markers now")
	if err := u.writeProtect(run.Addr, uint64(run.Bytes()), false); err != nil {
		t.Fatal(err)
	}
	check("let go")
	if err := u.unregister(run.Addr, uint64(run.Bytes())); err != nil {
		t.Fatal(err)
	}
	for _, e := range want {
		mem[e.Offset()] ^= 0xff // must not hang
	}
}

func TestOwnPage(t *testing.T) {
	const marker = 31 | 1<<5
	tests := map[string]struct {
		entry uint64
		want  bool
	}{
		"nothing":                    {0, false},
		"of the file":                {pmPresent | pmFile, false},
		"own":                        {pmPresent, true},
		"own, protected":             {pmPresent | pmUFFDWP, true},
		"swapped out":                {pmSwapped | 3, true},
		"swapped out, protected":     {pmSwapped | pmUFFDWP | 3 | 1<<5, true},
		"marker":                     {pmSwapped | pmUFFDWP | marker, false},
		"moving, of the file":        {pmSwapped | pmFile | 29, false},
		"seen without privileges":    {pmSwapped | pmUFFDWP, true},
		"soft-dirty bit and no page": {pmSoftDirty, false},
	}
	m := &pagemap{marker: func() uint64 { return marker }}
	for name, tt := range tests {
		if got := m.ownPage(tt.entry); got != tt.want {
			t.Errorf("%s: ownPage(%#x) = %t, want %t", name, tt.entry, got, tt.want)
		}
	}
}

// A page map of a process that has ended must say so, and not that the process owns nothing.
func TestPagemapOfTheDead(t *testing.T) {
	needRoot(t)
	img := base(t, 64, 0)
	g := startGuest(t, img, guestConfig{})
	p := pin(t, g.process)
	guest, err := readGuestMap(p, img)
	if err != nil {
		t.Fatal(err)
	}
	m, err := openPagemap(p)
	if err != nil {
		t.Fatal(err)
	}
	defer m.close()
	m.noScan = true
	g.kill()
	if err := m.owned(guest, Extent{0, 64}, func(Extent) {}); err == nil {
		t.Error("the page map of a dead process can be read")
	}
}

// BenchmarkOwned looks at 2 GiB: untouched but for every 64th of its 2 MiB; or all read and every 64th page owned.
func BenchmarkOwned(b *testing.B) {
	needRoot(b)
	img := base(b, 2<<30/PageSize, 0)
	for name, every := range map[string]int{"sparse": 64 * 512, "resident": 64} {
		mem, p, g := mapHere(b, img)
		m, err := openPagemap(p)
		if err != nil {
			b.Fatal(err)
		}
		for page := 0; page < len(mem)/PageSize; page++ {
			if page%every == 0 {
				mem[page*PageSize]++
			} else if name == "resident" {
				sum += mem[page*PageSize]
			}
		}
		for _, how := range []string{"scan", "read", "read,protected"} {
			m.noScan = how != "scan"
			if how == "read,protected" {
				u := uffdHere(b, p)
				run := g.runs[0]
				if err := u.register(run.Addr, uint64(run.Bytes())); err != nil {
					b.Fatal(err)
				}
				start := time.Now()
				if err := u.writeProtect(run.Addr, uint64(run.Bytes()), true); err != nil {
					b.Fatal(err)
				}
				b.Logf("%s: protecting all took %v", name, time.Since(start))
			}
			b.Run(name+"/"+how, func(b *testing.B) {
				for b.Loop() {
					if err := m.owned(g, Extent{0, g.pages()}, func(Extent) {}); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
		m.close()
		unix.Munmap(mem)
	}
}

var sum byte // keeps reads from being optimised away
