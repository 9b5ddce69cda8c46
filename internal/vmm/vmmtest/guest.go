package vmmtest

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/forkd/forkd/internal/guest/agentproto"
	"github.com/forkd/forkd/internal/vmm"
)

// Where the guest keeps what in its memory. All that it knows is there, so a child has what its parent had, and writes of its own
// are private to it by the kernel's copy-on-write and nothing else.
const (
	pageBytes    = 4096
	familyOffset = 0         // 16 bytes: the random id of the parent; 0 means that no guest was booted here
	ticksOffset  = pageBytes // a page of its own that a running guest goes on writing
	storeOffset  = 64 << 10  // length, then JSON: files, variables, identity
	storeBytes   = 192 << 10
	dataOffset   = storeOffset + storeBytes // poke and peek are for what lies from here
)

// tickEvery is how often an idle guest writes memory.
const tickEvery = 20 * time.Millisecond

// guest is what runs in a fake machine.
type guest struct {
	memory []byte
	gate   *gate
	dir    string
	over   chan<- string

	saves  int             // guarded by the hardware's mu
	faults map[Step]Action // set before the gate opens for the first time

	mu      sync.Mutex // guards the store and what follows
	console int64      // bytes written
	short   agentproto.Notice
	tell    func(agentproto.Notice) // the host, of short; nil: nobody listens yet
}

func newGuest(memory []byte, gate *gate, dir string, over chan<- string) *guest {
	return &guest{memory: memory, gate: gate, dir: dir, over: over}
}

// boot is the first start of a parent.
func (g *guest) boot(cmdline []string, python bool) error {
	if len(g.memory) < dataOffset {
		return fmt.Errorf("%d bytes of memory, a fake guest needs %d", len(g.memory), dataOffset)
	}
	if _, err := rand.Read(g.memory[familyOffset : familyOffset+16]); err != nil {
		return err
	}
	s := store{Hostname: "fake", Python: python}
	s.Random.mix([]byte(g.family()))
	s.Interpreter.mix([]byte(g.family()))
	s.setClock(time.Now().UnixNano(), 0)
	g.setStore(s)
	g.print(fmt.Sprintf("fake guest: booted, cmdline %q\n", cmdline))
	return nil
}

// restore is the start of a child.
func (g *guest) restore(state deviceState, faults map[Step]Action) {
	g.saves, g.faults = state.Saves, faults
	g.gate.setTime(state.Uptime)
	g.print("fake guest: loaded\n")
}

func (g *guest) family() string { return fmt.Sprintf("%x", g.memory[familyOffset:familyOffset+16]) }

// tick goes on writing memory while the machine runs, as guests do that have nothing to do. It ends with the process.
func (g *guest) tick() {
	page := g.memory[ticksOffset:]
	for range time.Tick(tickEvery) {
		g.gate.through(func() { binary.LittleEndian.PutUint64(page, binary.LittleEndian.Uint64(page)+1) })
	}
}

// uptime is how long the machine has run since its parent was booted, without the time it stood frozen.
func (g *guest) uptime() time.Duration { return g.gate.time() }

// print writes to the console, which keeps its newest bytes.
func (g *guest) print(s string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	path, flags := filepath.Join(g.dir, consoleFile), os.O_CREATE|os.O_WRONLY|os.O_APPEND
	if g.console += int64(len(s)); g.console > 8*vmm.ConsoleLimit {
		old, _ := os.ReadFile(path)
		s = string(old[max(0, len(old)-vmm.ConsoleLimit):]) + s
		g.console, flags = int64(len(s)), flags|os.O_TRUNC
	}
	f, err := os.OpenFile(path, flags, 0o600)
	if err != nil {
		return // the run directory is being removed
	}
	defer f.Close()
	_, _ = f.WriteString(s)
}

// shutdown ends the machine as a guest that powers off does.
func (g *guest) shutdown(why string) { g.end("the guest powered off: " + why) }

// panicPrefix marks the end of a guest whose kernel panicked.
const panicPrefix = "panic: "

func (g *guest) end(how string) {
	select {
	case g.over <- how:
	default: // it ends already
	}
}

// shortage changes what the guest is short of, and tells the host.
func (g *guest) shortage(change func(*agentproto.Notice)) {
	g.mu.Lock()
	defer g.mu.Unlock()
	change(&g.short)
	if g.tell != nil {
		g.tell(g.short)
	}
}
