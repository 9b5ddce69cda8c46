package vmmtest

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"time"
)

// store is what the guest remembers, in its memory.
type store struct {
	Hostname, InstanceID, MachineID string
	Python                          bool
	ClockBase                       int64         // Unix time in ns at ClockAt
	ClockAt                         time.Duration // uptime when the clock was set
	Env                             []string
	Files                           map[string]string
	Vars                            map[string]string // by name, their repr
	Random, Interpreter             generator
}

// clock is the guest's wall clock: a machine that stood frozen is late.
func (s *store) clock(uptime time.Duration) int64 { return s.ClockBase + int64(uptime-s.ClockAt) }

func (s *store) setClock(unixNano int64, uptime time.Duration) {
	s.ClockBase, s.ClockAt = unixNano, uptime
}

// generator is a random number generator whose state is in the guest's memory: siblings draw the same numbers until one is mixed.
type generator struct{ State [sha256.Size]byte }

func (g *generator) mix(fresh []byte) {
	g.State = sha256.Sum256(append(g.State[:], fresh...))
}

func (g *generator) next() [sha256.Size]byte {
	out := sha256.Sum256(append(g.State[:], "out"...))
	g.mix([]byte("next"))
	return out
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

// setStore writes the store, or drops the change and returns false when the store is full. Preconditions: as for getStore.
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

// change runs guest code that changes the store. It returns false when the store is full.
func (g *guest) change(do func(*store)) bool {
	g.gate.enter()
	defer g.gate.leave()
	g.mu.Lock()
	defer g.mu.Unlock()
	s := g.getStore()
	do(&s)
	return g.setStore(s)
}

// draw takes random bytes from one of the guest's generators.
func (g *guest) draw(from func(*store) *generator) [sha256.Size]byte {
	var out [sha256.Size]byte
	g.change(func(s *store) { out = from(s).next() })
	return out
}
