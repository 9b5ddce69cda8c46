package sandbox

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/forkd/forkd/internal/guest/agentproto"
)

// ConditionKind is something that is the matter with a sandbox that lives on.
type ConditionKind string

// Conditions.
const (
	ConditionGuestOOM ConditionKind = "guest_oom" // the guest's kernel killed programs for want of memory
	ConditionDiskFull ConditionKind = "disk_full" // hardly anything can be written in the guest
)

// Condition is one that holds. That of memory holds for as long as the sandbox lives.
type Condition struct {
	Kind   ConditionKind
	Since  time.Time // when the daemon learned of it
	Count  int       // programs that were killed; 0 for other conditions
	Detail string    // for people
}

// conditions are those of one sandbox.
type conditions struct {
	mu   sync.Mutex
	last agentproto.Notice // what the guest said last
	all  []Condition
}

func (c *conditions) list() []Condition {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.all)
}

// mostKills is how many kills are believed of one notice: guests are not trusted.
const mostKills = 1000

// take takes in what the guest says, and returns what is to be told of it: conditions that begin or went on, and those that are over. New are
// the programs that were killed since the last notice.
func (c *conditions) take(n agentproto.Notice, now time.Time) (begun, over []Condition, killed int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	killed = int(n.OOMKills - c.last.OOMKills)
	if n.OOMKills < c.last.OOMKills { // it is as it was when it was suspended, or lies
		killed = int(n.OOMKills)
	}
	killed = min(killed, mostKills)
	if killed > 0 {
		begun = append(begun, c.setLocked(Condition{Kind: ConditionGuestOOM, Since: now, Count: int(n.OOMKills),
			Detail: fmt.Sprintf("the guest had no memory left: its kernel has killed %s, last %s", counted(int(n.OOMKills), "program"), printable(n.Victim))}))
	}
	if n.DiskFull && !c.last.DiskFull {
		begun = append(begun, c.setLocked(Condition{Kind: ConditionDiskFull, Since: now,
			Detail: fmt.Sprintf("the guest's disk is full: %d KiB of %d MiB are free", n.DiskFree>>10, n.DiskSize>>20)}))
	}
	if !n.DiskFull && c.last.DiskFull {
		c.all = slices.DeleteFunc(c.all, func(have Condition) bool { return have.Kind == ConditionDiskFull })
		over = append(over, Condition{Kind: ConditionDiskFull, Since: now, Detail: fmt.Sprintf("the guest's disk has room again: %d MiB of %d are free", n.DiskFree>>20, n.DiskSize>>20)})
	}
	c.last = n
	return begun, over, killed
}

// setLocked adds a condition or goes on with it. Preconditions: mu is held.
func (c *conditions) setLocked(next Condition) Condition {
	for i, have := range c.all {
		if have.Kind == next.Kind {
			next.Since = have.Since
			c.all[i] = next
			return next
		}
	}
	c.all = append(c.all, next)
	return next
}

func counted(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// printable is a name that a guest gave, for people.
func printable(s string) string {
	s = strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return -1
	}, strings.ToValidUTF8(s, ""))
	const most = 32
	if r := []rune(s); len(r) > most {
		s = string(r[:most])
	}
	return cmp.Or(s, "one without a name")
}

// hearing is what a child's agent said without having been asked. Only the newest counts.
type hearing struct {
	news chan struct{} // holds a token when there is something new

	mu   sync.Mutex
	said agentproto.Notice
}

func newHearing() *hearing { return &hearing{news: make(chan struct{}, 1)} }

// hear is called by the agent's client.
func (h *hearing) hear(n agentproto.Notice) {
	h.mu.Lock()
	h.said = n
	h.mu.Unlock()
	select {
	case h.news <- struct{}{}:
	default:
	}
}

func (h *hearing) newest() agentproto.Notice {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.said
}

// noticePause is how long a sandbox must wait before it may say the next thing.
const noticePause = 250 * time.Millisecond

// notice takes in what a sandbox's guest said, and tells everybody.
func (m *Manager) notice(b *box, c *child) {
	begun, over, killed := b.conditions.take(c.heard.newest(), time.Now())
	m.counts.guestOOM.Add(uint64(killed))
	for _, cond := range begun {
		if cond.Kind == ConditionDiskFull {
			m.counts.diskFull.Add(1)
		}
		m.emit(Event{Kind: EventCondition, Tenant: b.tenant, SandboxID: b.id, Tag: b.frozen.tag, State: StateRunning, Condition: cond.Kind, Reason: cond.Detail})
	}
	for _, cond := range over {
		m.emit(Event{Kind: EventConditionOver, Tenant: b.tenant, SandboxID: b.id, Tag: b.frozen.tag, State: StateRunning, Condition: cond.Kind, Reason: cond.Detail})
	}
}
