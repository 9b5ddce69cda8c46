package sandbox

import (
	"bufio"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
)

// admission hands out memory before a machine is started, so that the host doesn't run out of it.
//
// With a fixed budget every machine counts with its whole estimate until it is gone. Without one the host's MemAvailable is what there
// is to hand out: a machine that is being started counts with its estimate; once it runs, what it took is missing from MemAvailable
// by itself and only the growth that is still expected of it counts.
type admission struct {
	budget    int64                 // bytes; 0: MemAvailable
	reserve   int64                 // bytes left to the rest of the host, without a budget
	available func() (int64, error) // MemAvailable in bytes

	mu   sync.Mutex
	held int64
}

// need is the memory that a machine is expected to take, in bytes.
type need struct {
	start  int64 // until it is ready
	growth int64 // afterwards
}

func (n need) total() int64 { return n.start + n.growth }

// grant is memory handed out to one machine.
type grant struct {
	from *admission
	need need

	mu      sync.Mutex
	settled bool
	gone    bool
}

// take hands out memory for up to n machines: for as many as there is room for.
func (a *admission) take(n int, each need) ([]*grant, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	free, err := a.freeLocked()
	if err != nil {
		return nil, err
	}
	var grants []*grant
	for len(grants) < n && free >= each.total() {
		free -= each.total()
		a.held += each.total()
		grants = append(grants, &grant{from: a, need: each})
	}
	return grants, nil
}

// force hands out memory that is in use already: that of a machine which outlived the daemon.
func (a *admission) force(each need) *grant {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.held += each.total()
	return &grant{from: a, need: each}
}

// free is what may still be handed out, in bytes.
func (a *admission) free() (int64, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.freeLocked()
}

func (a *admission) freeLocked() (int64, error) {
	if a.budget > 0 {
		return a.budget - a.held, nil
	}
	n, err := a.available()
	if err != nil {
		return 0, fmt.Errorf("read how much memory is available: %w", err)
	}
	return n - a.reserve - a.held, nil
}

// stats returns the budget, with what is in use when the host's memory is the budget, and what is held.
func (a *admission) stats() (budget, held int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	free, err := a.freeLocked()
	if err != nil {
		return 0, a.held
	}
	return free + a.held, a.held
}

// settle says that the machine is ready.
func (g *grant) settle() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.settled || g.gone || g.from.budget > 0 {
		return
	}
	g.settled = true
	g.from.giveBack(g.need.start)
}

// release gives the memory back. Releasing twice is harmless.
func (g *grant) release() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.gone {
		return
	}
	g.gone = true
	if g.settled {
		g.from.giveBack(g.need.growth)
		return
	}
	g.from.giveBack(g.need.total())
}

func (a *admission) giveBack(bytes int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.held -= bytes
}

// memAvailable is the kernel's estimate of the memory that can be used without swapping (proc_meminfo(5)).
func memAvailable() (int64, error) {
	f, err := os.Open("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	defer func() { _ = f.Close() }()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if rest, ok := strings.CutPrefix(lines.Text(), "MemAvailable:"); ok {
			kib, err := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(rest, "kB")), 10, 64)
			return kib << 10, err
		}
	}
	if err := lines.Err(); err != nil {
		return 0, err
	}
	return 0, fmt.Errorf("/proc/meminfo has no MemAvailable")
}
