package vmmtest

import (
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

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

// tickEvery is how often a running guest counts up.
const tickEvery = 20 * time.Millisecond

// guest is what runs in a fake machine.
type guest struct {
	memory []byte
	gate   *gate
	dir    string
	over   chan<- string

	saves  int // guarded by the hardware's mu
	ticks  atomic.Uint64
	faults map[Step]Action // set before the gate opens for the first time

	mu      sync.Mutex // guards the store and the console
	console int64      // bytes written
}

func newGuest(memory []byte, gate *gate, dir string, over chan<- string) *guest {
	return &guest{memory: memory, gate: gate, dir: dir, over: over}
}

// boot is the first start of a parent.
func (g *guest) boot(cmdline []string) error {
	if len(g.memory) < dataOffset {
		return fmt.Errorf("%d bytes of memory, a fake guest needs %d", len(g.memory), dataOffset)
	}
	if _, err := rand.Read(g.memory[familyOffset : familyOffset+16]); err != nil {
		return err
	}
	g.setStore(store{Hostname: "fake"})
	g.print(fmt.Sprintf("fake guest: booted, cmdline %q\n", cmdline))
	return nil
}

// restore is the start of a child.
func (g *guest) restore(state deviceState, faults map[Step]Action) {
	g.saves, g.faults = state.Saves, faults
	g.ticks.Store(state.Ticks)
	g.print("fake guest: loaded\n")
}

func (g *guest) family() string { return fmt.Sprintf("%x", g.memory[familyOffset:familyOffset+16]) }

// tick counts the guest's uptime while the machine runs. It ends with the process.
func (g *guest) tick() {
	for range time.Tick(tickEvery) {
		g.gate.through(func() { binary.LittleEndian.PutUint64(g.memory[ticksOffset:], g.ticks.Add(1)) })
	}
}

func (g *guest) uptime() time.Duration { return time.Duration(g.ticks.Load()) * tickEvery }

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
func (g *guest) shutdown(why string) {
	select {
	case g.over <- "the guest powered off: " + why:
	default: // it ends already
	}
}

// store is what the guest remembers.
type store struct {
	Hostname, InstanceID, MachineID string
	Identities                      int
	Env                             []string
	Files                           map[string]string
	Vars                            map[string]string // by name, their repr
}

// getStore reads the store. Preconditions: g.mu is held, or no request can be running.
func (g *guest) getStore() store {
	var s store
	n := binary.LittleEndian.Uint32(g.memory[storeOffset:])
	if n > 0 && n < storeBytes-4 {
		_ = json.Unmarshal(g.memory[storeOffset+4:storeOffset+4+int(n)], &s)
	}
	return s
}

// setStore writes the store, or drops the change when the store is full. Preconditions: as for getStore.
func (g *guest) setStore(s store) bool {
	b, err := json.Marshal(s)
	if err != nil || len(b) >= storeBytes-4 {
		return false
	}
	binary.LittleEndian.PutUint32(g.memory[storeOffset:], uint32(len(b)))
	copy(g.memory[storeOffset+4:], b)
	return true
}

// view runs guest code that reads the store.
func (g *guest) view() store {
	g.gate.enter()
	defer g.gate.leave()
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.getStore()
}

// change runs guest code that changes the store.
func (g *guest) change(do func(*store)) bool {
	g.gate.enter()
	defer g.gate.leave()
	g.mu.Lock()
	defer g.mu.Unlock()
	s := g.getStore()
	do(&s)
	return g.setStore(s)
}

// servePort serves a guest port as QEMU does: one connection at a time. It ends with the process.
func (g *guest) servePort(l net.Listener, port uint32) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		g.serveConn(gatedConn{conn, g.gate}, port)
	}
}
