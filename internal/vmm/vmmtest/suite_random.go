package vmmtest

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/vmm"
)

// modelVM is what the suite expects of a machine.
type modelVM struct {
	*vm
	paused bool
	text   string // what its guest remembers
}

// randomRun makes machines, does to them what the dice say, and compares with the model.
type randomRun struct {
	*suite
	t    *testing.T
	dice *rand.Rand
	live []*modelVM
	log  []string // the last actions, for a failure's report
}

// action is something that can be done to a machine.
type action struct {
	name   string
	weight int // how often, compared with others
	do     func(*modelVM)
}

// maxLive bounds how many machines a random sequence keeps.
const maxLive = 4

func (s *suite) testRandomSequence(t *testing.T) {
	before := children()
	r := &randomRun{suite: s, t: t, dice: rand.New(rand.NewPCG(s.h.Seed, 1))}
	t.Logf("seed %d", s.h.Seed)
	for step := 0; step < s.h.Steps && !t.Failed(); step++ {
		r.step()
	}
	if t.Failed() {
		t.Logf("the last actions: %v", r.log[max(0, len(r.log)-20):])
	}
	for _, m := range r.live {
		m.agent.close()
		if err := m.Kill(); err != nil {
			t.Errorf("Kill: %v", err)
		}
	}
	checkNoProcess(t, s.template.ram, before)
}

func (r *randomRun) step() {
	if len(r.live) == 0 || (len(r.live) < maxLive && r.dice.IntN(6) == 0) {
		r.fork()
		return
	}
	i := r.dice.IntN(len(r.live))
	m := r.live[i]
	actions := []action{
		{"pause", 4, r.pause},
		{"resume", 6, r.resume},
		{"save", 2, r.save},
		{"write", 6, r.write},
		{"read", 8, r.read},
		{"reconnect", 2, r.reconnect},
		{"attach", 2, r.attach},
		{"kill", 1, r.kill},
		{"kill -9", 1, r.killOutside},
	}
	total := 0
	if r.h.Detach == nil {
		actions = slices.DeleteFunc(actions, func(a action) bool { return a.name == "attach" })
	}
	for _, a := range actions {
		total += a.weight
	}
	roll := r.dice.IntN(total)
	for _, a := range actions {
		if roll -= a.weight; roll < 0 {
			r.log = append(r.log, fmt.Sprintf("%s %d", a.name, m.Process().PID))
			a.do(m)
			return
		}
	}
}

func (r *randomRun) fork() {
	m := &modelVM{vm: r.suite.fork(r.t, fmt.Sprintf("r%d", len(r.log))), text: r.template.mark}
	r.log = append(r.log, fmt.Sprintf("fork %d", m.Process().PID))
	r.live = append(r.live, m)
}

func (r *randomRun) check(what string, err error) {
	r.t.Helper()
	if err != nil {
		r.t.Errorf("%s: %v", what, err)
	}
}

func (r *randomRun) pause(m *modelVM) {
	r.check("Pause", m.Pause(r.suite.step(r.t)))
	m.paused = true
}

func (r *randomRun) resume(m *modelVM) {
	r.check("Resume", m.Resume(r.suite.step(r.t)))
	m.paused = false
}

func (r *randomRun) save(m *modelVM) {
	r.pause(m)
	r.check("SaveState", m.SaveState(r.suite.step(r.t), newState(r.t)))
}

func (r *randomRun) write(m *modelVM) {
	if m.paused {
		return
	}
	m.text = fmt.Sprintf("text-%d", r.dice.Uint32())
	r.suite.write(r.t, m.vm, m.text)
}

func (r *randomRun) read(m *modelVM) {
	if !m.paused {
		r.checkRead(r.t, m.vm, m.text)
	}
}

func (r *randomRun) reconnect(m *modelVM) {
	m.agent.close()
	m.vm = r.withAgent(m.Machine, true)
	r.read(m)
}

func (r *randomRun) attach(m *modelVM) {
	m.agent.close()
	r.check("Detach", r.h.Detach(m.Machine))
	attached, err := r.h.Engine.Attach(r.suite.step(r.t), m.Process())
	if err != nil {
		r.t.Fatalf("Attach: %v", err)
	}
	r.end(r.t, attached)
	m.vm = r.withAgent(attached, true)
	r.read(m)
}

func (r *randomRun) kill(m *modelVM) {
	r.check("Kill", m.Kill())
	r.checkEnd(r.t, m, vmm.ExitKilled)
	r.forget(m)
}

func (r *randomRun) killOutside(m *modelVM) {
	r.check("kill -9", unix.Kill(m.Process().PID, unix.SIGKILL))
	r.checkEnd(r.t, m, vmm.ExitCrashed)
	r.check("Kill", m.Kill())
	r.forget(m)
}

func (r *randomRun) forget(m *modelVM) {
	m.agent.close()
	checkEmpty(r.t, m.Process().Dir)
	for i := range r.live {
		if r.live[i] == m {
			r.live = append(r.live[:i], r.live[i+1:]...)
			return
		}
	}
}
