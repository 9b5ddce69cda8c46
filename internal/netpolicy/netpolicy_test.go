package netpolicy

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseRule(t *testing.T) {
	prefix := netip.MustParsePrefix
	tests := []struct {
		text string
		want Rule
	}{
		{"example.com", Rule{Domain: "example.com"}},
		{"Example.COM.", Rule{Domain: "example.com"}},
		{"*.example.com:443", Rule{Domain: "*.example.com", Low: 443, High: 443}},
		{"*:443/udp", Rule{Domain: "*", Low: 443, High: 443, Proto: UDP}},
		{"1.2.3.4", Rule{Prefix: prefix("1.2.3.4/32")}},
		{"10.0.0.0/8:8000-8100/tcp", Rule{Prefix: prefix("10.0.0.0/8"), Low: 8000, High: 8100, Proto: TCP}},
		{"0.0.0.0/0", Rule{Prefix: prefix("0.0.0.0/0")}},
		{"_dmarc.example.com", Rule{Domain: "_dmarc.example.com"}},
	}
	for _, tt := range tests {
		got, err := ParseRule(tt.text)
		if err != nil {
			t.Errorf("%s: %v", tt.text, err)
		}
		if diff := cmp.Diff(tt.want, got, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.text, diff)
		}
	}
	for _, text := range []string{
		"", ":80", "*.*.com", "a.*.com", "ex ample.com", "-a.com", "a..com", "example.com:", "example.com:0", "example.com:65536",
		"example.com:9-8", "example.com:80/icmp", "1.2.3.4/33", "1.2.3.4/8", "1.2.3", "::1", "[::1]:80", "2001:db8::/32", "fe80::1",
		"a.com:80:80", "http://example.com", strings.Repeat("a", 64) + ".com", "exämple.com", "com/8", "a.com/", "256.1.1.1",
	} {
		if r, err := ParseRule(text); !errors.Is(err, ErrInvalid) {
			t.Errorf("%q was taken for %+v, %v", text, r, err)
		}
	}
}

func TestPolicy(t *testing.T) {
	for _, p := range []Policy{{}, {Mode: None}, {Mode: Open}, {Mode: Allow, Rules: []string{"a.com"}}, {Mode: Open, BandwidthMbit: 10}} {
		if _, err := p.Parse(); err != nil {
			t.Errorf("%+v: %v", p, err)
		}
	}
	many := make([]string, MaxRules+1)
	for _, p := range []Policy{{Mode: "all"}, {Mode: Allow}, {Mode: None, Rules: []string{"a.com"}}, {Rules: []string{"a.com"}}, {Mode: Open, Rules: []string{"a.com"}},
		{Mode: Allow, Rules: many}, {Mode: Open, BandwidthMbit: -1}} {
		if _, err := p.Parse(); !errors.Is(err, ErrInvalid) {
			t.Errorf("%.80s was taken: %v", p, err)
		}
	}
}

func TestMatchName(t *testing.T) {
	tests := []struct {
		domain, name string
		want         bool
	}{
		{"example.com", "example.com", true},
		{"example.com", "EXAMPLE.com", true},
		{"example.com", "www.example.com", false},
		{"example.com", "badexample.com", false},
		{"*.example.com", "www.example.com", true},
		{"*.example.com", "a.b.example.com", true},
		{"*.example.com", "example.com", false},
		{"*.example.com", ".example.com", false},
		{"*.example.com", "badexample.com", false},
		{"*.example.com", "www.example.com.evil.org", false},
		{"*", "anything.org", true},
		{"", "", false},
	}
	for _, tt := range tests {
		if got := (Rule{Domain: tt.domain}).MatchName(tt.name); got != tt.want {
			t.Errorf("%q matches %q: %v, want %v", tt.domain, tt.name, got, tt.want)
		}
	}
}

func TestProtected(t *testing.T) {
	for _, s := range []string{"10.0.0.1", "127.0.0.1", "169.254.169.254", "172.31.255.255", "192.168.1.1", "100.64.0.1", "255.255.255.255", "224.0.0.1", "168.63.129.16"} {
		if !IsProtected(netip.MustParseAddr(s)) {
			t.Errorf("%s is not protected", s)
		}
	}
	for _, s := range []string{"8.8.8.8", "172.32.0.1", "11.0.0.1", "100.128.0.1", "203.0.113.1"} {
		if IsProtected(netip.MustParseAddr(s)) {
			t.Errorf("%s is protected", s)
		}
	}
	for s, want := range map[string]bool{"10.1.0.0/16": true, "10.0.0.0/8": true, "10.0.0.0/7": false, "0.0.0.0/0": false, "8.8.8.8/32": false} {
		if got := NamesProtected(netip.MustParsePrefix(s)); got != want {
			t.Errorf("%s names a protected range: %v, want %v", s, got, want)
		}
	}
}

func FuzzParseRule(f *testing.F) {
	for _, s := range []string{"a.com:1-2/tcp", "1.2.3.4/8", "*.a", "*"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		r, err := ParseRule(s)
		if err == nil && (r.Domain == "") == !r.Prefix.IsValid() {
			t.Errorf("%q is %+v", s, r)
		}
	})
}
