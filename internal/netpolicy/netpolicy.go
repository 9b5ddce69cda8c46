// Package netpolicy says what a sandbox may reach: the words of users, and what they mean. It enforces nothing; internal/hostnet does.
//
// A policy has a mode: none reaches nothing, open everything but what is protected, allow what its rules name. A rule is TARGET, TARGET:PORT,
// TARGET:LOW-HIGH, or one of the latter with /tcp or /udp at its end. TARGET is a domain, *.DOMAIN for all below one, * for every name, or an
// IPv4 address or CIDR. Without a port a rule is for all ports of TCP and UDP, and for ping.
//
// Protected is what a machine in a network of others' must not find: the host's own addresses, the cloud's metadata, private and link-local
// ranges, other sandboxes. A rule opens a part of it only by naming an address or CIDR that lies within that part: 10.1.0.0/16 opens that, and
// 0.0.0.0/0 nothing that is protected. The host and metadata services are opened by their very address alone. No name ever leads to what is
// protected, whatever its servers answer.
package netpolicy

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// Mode is what a policy begins with.
type Mode string

// Modes.
const (
	None  Mode = "none"
	Allow Mode = "allow"
	Open  Mode = "open"
)

// MaxRules is how many rules a policy may have.
const MaxRules = 256

// ErrInvalid is wrapped by errors about what a user wrote.
var ErrInvalid = errors.New("invalid network policy")

// Policy is what a sandbox may reach. The zero value reaches nothing.
type Policy struct {
	Mode  Mode     `json:"mode"`
	Rules []string `json:"allow,omitempty"` // only with Allow

	// BandwidthMbit bounds what goes through the network in each direction, in 10^6 bits a second; 0: nothing does.
	BandwidthMbit int `json:"bandwidth_mbit,omitempty"`

	// Privileged: who set the policy may open what is protected, by naming it. Without that such rules open nothing.
	Privileged bool `json:"privileged,omitempty"`
}

// IsNone says whether the policy reaches nothing.
func (p Policy) IsNone() bool { return p.Mode == "" || p.Mode == None }

// String is the policy for people.
func (p Policy) String() string {
	if p.Mode == Allow {
		return "allow " + strings.Join(p.Rules, ", ")
	}
	if p.IsNone() {
		return string(None)
	}
	return string(p.Mode)
}

// Named returns the first rule that names something protected, or "". That an address is the host's own can't be told here.
func (p Policy) Named() string {
	for _, text := range p.Rules {
		r, err := ParseRule(text)
		if err == nil && r.Prefix.IsValid() && (NamesProtected(r.Prefix) || r.Prefix.Bits() == 32 && IsProtected(r.Prefix.Addr())) {
			return text
		}
	}
	return ""
}

// Proto is what a rule is for.
type Proto uint8

// Protocols, as numbers of IP; Any is TCP, UDP and ping.
const (
	Any Proto = 0
	TCP Proto = 6
	UDP Proto = 17
)

// Rule is a rule that was understood: Domain or Prefix is set.
type Rule struct {
	Domain    string       // lower case, without a dot at its end; "*" or "*.example.com" for all below it
	Prefix    netip.Prefix // of IPv4
	Low, High uint16       // ports; both 0: all, and ping
	Proto     Proto
}

// Parse understands the rules of a policy and checks all of it.
func (p Policy) Parse() ([]Rule, error) {
	switch p.Mode {
	case "", None, Open:
		if len(p.Rules) > 0 {
			return nil, fmt.Errorf("%w: what is allowed is given, and the mode is %s: use allow, or leave it out", ErrInvalid, p)
		}
	case Allow:
		if len(p.Rules) == 0 {
			return nil, fmt.Errorf("%w: allow needs something that is allowed; for nothing use none", ErrInvalid)
		}
	default:
		return nil, fmt.Errorf("%w: mode %.80q: use none, allow or open", ErrInvalid, p.Mode)
	}
	if p.BandwidthMbit < 0 || p.BandwidthMbit > 100_000 {
		return nil, fmt.Errorf("%w: bandwidth of %d Mbit/s: choose 1 to 100000, or 0 for no limit", ErrInvalid, p.BandwidthMbit)
	}
	if len(p.Rules) > MaxRules {
		return nil, fmt.Errorf("%w: %d rules, the limit is %d: use wildcards or larger CIDRs", ErrInvalid, len(p.Rules), MaxRules)
	}
	rules := make([]Rule, 0, len(p.Rules))
	for _, text := range p.Rules {
		r, err := ParseRule(text)
		if err != nil {
			return nil, err
		}
		if !slices.Contains(rules, r) {
			rules = append(rules, r)
		}
	}
	return rules, nil
}

// ParseRule understands one rule.
func ParseRule(text string) (Rule, error) {
	var r Rule
	target, ports, hasPorts := strings.Cut(text, ":")
	if strings.Count(text, ":") > 1 {
		return r, fmt.Errorf("%w: rule %.80q: IPv6 is not spoken in sandboxes; give a domain or an IPv4 address", ErrInvalid, text)
	}
	if hasPorts {
		if err := r.parsePorts(ports); err != nil {
			return r, fmt.Errorf("%w: rule %.80q: %w", ErrInvalid, text, err)
		}
	}
	if err := r.parseTarget(target); err != nil {
		return r, fmt.Errorf("%w: rule %.80q: %w", ErrInvalid, text, err)
	}
	return r, nil
}

func (r *Rule) parsePorts(s string) error {
	s, proto, hasProto := strings.Cut(s, "/")
	switch {
	case !hasProto:
	case proto == "tcp":
		r.Proto = TCP
	case proto == "udp":
		r.Proto = UDP
	default:
		return fmt.Errorf("protocol %q: use tcp or udp, or leave it out for both", proto)
	}
	low, high, isRange := strings.Cut(s, "-")
	if !isRange {
		high = low
	}
	from, err := strconv.ParseUint(low, 10, 16)
	to, err2 := strconv.ParseUint(high, 10, 16)
	if err != nil || err2 != nil || from == 0 || from > to {
		return fmt.Errorf("port %q: give one from 1 to 65535, or a range such as 8000-8100", s)
	}
	r.Low, r.High = uint16(from), uint16(to)
	return nil
}

func (r *Rule) parseTarget(s string) error {
	if p, err := parsePrefix(s); err == nil {
		if !p.Addr().Is4() {
			return errors.New("IPv6 is not spoken in sandboxes")
		}
		if p != p.Masked() {
			return fmt.Errorf("%s has bits behind its length: did you mean %s?", p, p.Masked())
		}
		r.Prefix = p
		return nil
	}
	name := strings.ToLower(strings.TrimSuffix(s, "."))
	below := strings.TrimPrefix(name, "*.")
	if name == "*" {
		r.Domain = name
		return nil
	}
	if len(below) == 0 || len(below) > 253 {
		return fmt.Errorf("%q is neither a domain, nor an IPv4 address or CIDR", s)
	}
	labels := strings.Split(below, ".")
	for _, label := range labels {
		if !validLabel(label) {
			return fmt.Errorf("%q is neither a domain (international ones in their xn-- form; *. only at the beginning), nor an IPv4 address or CIDR", s)
		}
	}
	if digits(labels[len(labels)-1]) {
		return fmt.Errorf("%q is neither an IPv4 address nor a CIDR", s)
	}
	r.Domain = name
	return nil
}

func parsePrefix(s string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(s); err == nil {
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	return netip.ParsePrefix(s)
}

func validLabel(s string) bool {
	if len(s) == 0 || len(s) > 63 || s[0] == '-' || s[len(s)-1] == '-' {
		return false
	}
	for _, c := range []byte(s) {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' && c != '_' {
			return false
		}
	}
	return true
}

func digits(s string) bool { return strings.Trim(s, "0123456789") == "" }

// MatchName says whether the rule names a domain. name is without a dot at its end.
func (r Rule) MatchName(name string) bool {
	name = strings.ToLower(name)
	switch {
	case r.Domain == "":
		return false
	case r.Domain == "*":
		return true
	case strings.HasPrefix(r.Domain, "*."):
		return strings.HasSuffix(name, r.Domain[1:]) && len(name) > len(r.Domain)-1
	}
	return name == r.Domain
}
