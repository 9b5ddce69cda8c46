package hostnet

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/netpolicy"
)

// applied is the policy that a slot's kernel holds.
type applied struct {
	policy  netpolicy.Policy
	rules   []netpolicy.Rule
	mark    uint32         // of connections that passed it: those of an earlier policy are looked at again
	domains []string       // that have a set, in order
	set     map[string]int // their places
}

// newApplied numbers the domains: rules with the same domain share a set.
func newApplied(p netpolicy.Policy, mark uint32) (*applied, error) {
	rules, err := p.Parse()
	if err != nil {
		return nil, err
	}
	a := &applied{policy: p, rules: rules, mark: mark, set: map[string]int{}}
	for _, r := range rules {
		if _, known := a.set[r.Domain]; r.Domain != "" && !known {
			a.set[r.Domain] = len(a.domains)
			a.domains = append(a.domains, r.Domain)
		}
	}
	return a, nil
}

// domainSet is the set of addresses that a domain has led to.
func (a *applied) domainSet(domain string) *nftables.Set {
	return &nftables.Set{Table: table(), Name: fmt.Sprintf("%s%d-%d", domainSets, a.mark, a.set[domain]), HasTimeout: true, KeyType: nftables.TypeIPAddr, Size: maxLearned}
}

// heldSet is the set of all addresses that a domain had led to when the policy was set: connections to them go on, as they do when the time of an
// answer is over.
func (a *applied) heldSet(domain string) *nftables.Set {
	return &nftables.Set{Table: table(), Name: fmt.Sprintf("%s%d-%d", heldSets, a.mark, a.set[domain]), KeyType: nftables.TypeIPAddr}
}

// How names of those sets begin.
const (
	domainSets = "names-"
	heldSets   = "held-"
)

func isDomainSet(name string) bool {
	return strings.HasPrefix(name, domainSets) || strings.HasPrefix(name, heldSets)
}

// seal is the name of an empty chain that says which policy a table holds, for a daemon that finds it.
func (a *applied) seal() string {
	return sealPrefix + strconv.FormatUint(uint64(a.mark), 10) + "-" + digest(a.policy)
}

const sealPrefix = "holds-"

func digest(p netpolicy.Policy) string {
	b, _ := json.Marshal(p) // strings and numbers: it can't fail
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:16])
}

// readSeal takes a seal's name apart.
func readSeal(chain string) (mark uint32, policy string, ok bool) {
	rest, ok := strings.CutPrefix(chain, sealPrefix)
	number, policy, ok2 := strings.Cut(rest, "-")
	n, err := strconv.ParseUint(number, 10, 32)
	return uint32(n), policy, ok && ok2 && err == nil
}

// replace makes a policy the one that a table holds, in one step. forget is called to add what removes the one before to the step. names are what the
// guest's names have led to so far.
func (a *applied) replace(conn *nftables.Conn, forget func(), host []netip.Addr, names *answers) error {
	r := &ruleset{conn: conn}
	t := table()
	for _, name := range []string{chainReplies, chainCrowd} {
		conn.AddChain(&nftables.Chain{Name: name, Table: t}) // a table that an older daemon made has none
	}
	for _, name := range policyChains {
		conn.FlushChain(&nftables.Chain{Name: name, Table: t})
	}
	for _, d := range a.domains {
		r.set(a.domainSet(d), learnedElements(names.live(d)))
		r.set(a.heldSet(d), addrElements(names.all(d)))
	}
	a.addRules(r, t, host)
	conn.AddChain(&nftables.Chain{Name: a.seal(), Table: t})
	forget()
	return r.flush()
}

// forget removes what a policy has in a table beside the rules; of nil, nothing.
func (a *applied) forget(conn *nftables.Conn) {
	if a == nil {
		return
	}
	conn.DelChain(&nftables.Chain{Name: a.seal(), Table: table()})
	for _, d := range a.domains {
		conn.DelSet(a.domainSet(d))
		conn.DelSet(a.heldSet(d))
	}
}

// policyChains are those that a policy fills.
var policyChains = []string{chainPolicy, chainCheck, chainReplies, chainPass, chainNames}

// addRules fills the chains that a policy is made of. A connection that passed it has its mark, and is not looked at again. One that has the mark
// of an earlier policy is, whoever speaks first.
func (a *applied) addRules(r *ruleset, t *nftables.Table, host []netip.Addr) {
	if a.policy.IsNone() {
		return
	}
	r.rule(t, chainNames, accept())
	r.rule(t, chainPolicy, ctMark(a.mark), established(), accept())
	for _, p := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_ICMP} {
		r.rule(t, chainPolicy, notIif(tapName), isReply(), ctMarked(), established(), l4proto(p), jump(chainReplies))
	}
	r.rule(t, chainPolicy, notIif(tapName), leave())
	for _, kind := range []exprs{l4proto(unix.IPPROTO_TCP), l4proto(unix.IPPROTO_UDP), echoRequest()} {
		r.rule(t, chainPolicy, kind, jump(chainCheck))
	}
	r.rule(t, chainPass, jump(chainCrowd))
	r.rule(t, chainPass, setCtMark(a.mark), accept())
	a.addChecks(r, t, host, outward)
	a.addChecks(r, t, host, inward)
}

// side is one way to look at a packet: where the other end stands in it, and what becomes of it if that is not allowed.
type side struct {
	chain      string
	addr, port uint32 // offsets in the headers of network and transport
	refuse     exprs
}

var (
	outward = side{chainCheck, daddrOffset, dportOffset, goTo(chainDeny)}
	inward  = side{chainReplies, saddrOffset, sportOffset, drop()}
)

// addChecks fills a chain with what may be reached. The order is what netpolicy says of what is protected.
func (a *applied) addChecks(r *ruleset, t *nftables.Table, host []netip.Addr, at side) {
	pass := func(to exprs, ru netpolicy.Rule) {
		for _, p := range at.ports(ru) {
			r.rule(t, at.chain, to, p, goTo(chainPass))
		}
	}
	for _, ru := range a.named() {
		if namesHost(ru, host) {
			pass(address(at.addr, ru.Prefix), ru)
		}
	}
	r.rule(t, at.chain, at.in(hostElements()), at.refuse)
	for _, ru := range a.named() {
		if ru.Prefix.IsValid() && netpolicy.NamesProtected(ru.Prefix) {
			pass(address(at.addr, ru.Prefix), ru)
		}
	}
	r.rule(t, at.chain, at.in(&nftables.Set{Name: protectedSet}), at.refuse)
	for _, ru := range a.rules {
		switch {
		case ru.Domain != "":
			pass(at.in(a.domainSet(ru.Domain)), ru)
			pass(rule(ctMarked(), established(), at.in(a.heldSet(ru.Domain))), ru)
		case !netpolicy.NamesProtected(ru.Prefix):
			pass(address(at.addr, ru.Prefix), ru)
		}
	}
	if a.policy.Mode == netpolicy.Open {
		r.rule(t, at.chain, goTo(chainPass))
	}
}

// named are the rules that may open what is protected.
func (a *applied) named() []netpolicy.Rule {
	if a.policy.Privileged {
		return a.rules
	}
	return nil
}

// namesHost says whether a rule is about one of those addresses alone.
func namesHost(r netpolicy.Rule, host []netip.Addr) bool {
	return r.Prefix.IsValid() && r.Prefix.Bits() == 32 && slices.Contains(host, r.Prefix.Addr())
}

func learnedElements(known map[netip.Addr]time.Time) []nftables.SetElement {
	var all []nftables.SetElement
	for addr, until := range known {
		if left := time.Until(until); left > 0 {
			all = append(all, nftables.SetElement{Key: addr.AsSlice(), Timeout: left})
		}
	}
	return all
}
