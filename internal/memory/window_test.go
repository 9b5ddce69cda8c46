package memory

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

func tracersOf(pid int) (int, error) {
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	n := 0
	for _, t := range tasks {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/status", pid, t.Name()))
		if err == nil && !strings.Contains(string(b), "\nTracerPid:\t0\n") {
			n++
		}
	}
	return n, err
}

func TestBranch(t *testing.T) {
	needRoot(t)
	const pages, written = 8192, 4096
	img := base(t, pages, written)
	g := startGuest(t, img, guestConfig{Writers: areas(2, written)})
	g.do("start")
	g.advances(written)
	for i := range 5 {
		g.do("stats")
		c, branch := g.capture(CaptureOptions{Mode: ModeLive})
		n := torn(t, branch, g.at, written)
		t.Logf("%d: %+v, %d pages, %d noted, %d faults, stall %d, torn %d, %d extents", i, c.Times, c.Pages, c.Noted, c.Faults, g.do("stats").StallNS, n, len(c.Layer.Extents))
		g.sane()
	}
}
