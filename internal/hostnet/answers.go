package hostnet

import (
	"net/netip"
	"slices"
	"time"

	"github.com/forkd/forkd/internal/netpolicy"
)

// answersKept bounds the addresses that are remembered of a guest's names. The kernel has those of the policy of now anyway.
const answersKept = 2048

// answers are addresses that the names of a guest have led to, and until when. What is over is remembered too, as long as there is room: connections
// from then may go on. A domain with a wildcard stands for names below it that are not known.
type answers struct {
	byName map[string]map[netip.Addr]time.Time
	order  []string // names, the one first that was not asked for the longest
	count  int
}

func newAnswers() *answers { return &answers{byName: map[string]map[netip.Addr]time.Time{}} }

// note remembers an address; an earlier time does not take the place of a later one.
func (k *answers) note(name string, addr netip.Addr, until time.Time) {
	known := k.byName[name]
	if known == nil {
		known = map[netip.Addr]time.Time{}
		k.byName[name] = known
	} else {
		i := slices.Index(k.order, name)
		k.order = slices.Delete(k.order, i, i+1)
	}
	k.order = append(k.order, name)
	was, has := known[addr]
	if !has {
		k.count++
	}
	if !has || was.Before(until) {
		known[addr] = until
	}
	for k.count > answersKept {
		k.count -= len(k.byName[k.order[0]])
		delete(k.byName, k.order[0])
		k.order = k.order[1:]
	}
}

// of calls do with what the names of a domain have led to.
func (k *answers) of(domain string, do func(netip.Addr, time.Time)) {
	rule := netpolicy.Rule{Domain: domain}
	for name, addrs := range k.byName {
		if name == domain || rule.MatchName(name) {
			for a, until := range addrs {
				do(a, until)
			}
		}
	}
}

// live are the addresses of a domain that may be reached now, and until when.
func (k *answers) live(domain string) map[netip.Addr]time.Time {
	out, now := map[netip.Addr]time.Time{}, time.Now()
	k.of(domain, func(a netip.Addr, until time.Time) {
		if until.After(now) && until.After(out[a]) {
			out[a] = until
		}
	})
	return out
}

// until says how long an address of a domain may be reached; the zero time: it may not.
func (k *answers) until(domain string, addr netip.Addr) (last time.Time) {
	k.of(domain, func(a netip.Addr, until time.Time) {
		if a == addr && until.After(last) {
			last = until
		}
	})
	return last
}

// all are the addresses that a domain has ever led to, as far as they are remembered.
func (k *answers) all(domain string) []netip.Addr {
	var out []netip.Addr
	k.of(domain, func(a netip.Addr, _ time.Time) { out = append(out, a) })
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out)
}
