package hostnet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"
)

// upstream asks the name servers of the host.
type upstream struct {
	fixed []string // HOST:PORT; none: what the host's configuration says

	mu      sync.Mutex
	read    time.Time // of the configuration
	servers []string
}

const resolvConf = "/etc/resolv.conf"

func newUpstream(servers []string) *upstream {
	u := &upstream{}
	for _, s := range servers {
		if _, _, err := net.SplitHostPort(s); err != nil {
			s = net.JoinHostPort(strings.Trim(s, "[]"), "53")
		}
		u.fixed = append(u.fixed, s)
	}
	return u
}

// list are the name servers of now: a host's may change.
func (u *upstream) list() ([]string, error) {
	if len(u.fixed) > 0 {
		return u.fixed, nil
	}
	info, err := os.Stat(resolvConf)
	if err != nil {
		return nil, fmt.Errorf("the host's name servers: %w", err)
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.servers != nil && info.ModTime().Equal(u.read) {
		return u.servers, nil
	}
	cfg, err := dns.ClientConfigFromFile(resolvConf)
	if err != nil {
		return nil, fmt.Errorf("the host's name servers: %w", err)
	}
	u.servers, u.read = nil, info.ModTime()
	for _, s := range cfg.Servers {
		u.servers = append(u.servers, net.JoinHostPort(s, cfg.Port))
	}
	return u.servers, nil
}

var errForged = errors.New("the answer is not to the question that was asked")

// ask asks one server after the other until one answers.
func (u *upstream) ask(ctx context.Context, q dns.Question) (*dns.Msg, error) {
	servers, err := u.list()
	if err == nil && len(servers) == 0 {
		err = errors.New("the host has no name server in " + resolvConf + ": use --dns")
	}
	if err != nil {
		return nil, err
	}
	var failed error
	for _, server := range servers {
		got, err := exchange(ctx, server, q)
		if err == nil {
			return got, nil
		}
		failed = errors.Join(failed, fmt.Errorf("name server %s: %w", server, err))
		if ctx.Err() != nil {
			break
		}
	}
	return nil, failed
}

// exchange asks one server, over TCP when the answer is too long for UDP.
func exchange(ctx context.Context, server string, q dns.Question) (*dns.Msg, error) {
	for _, network := range []string{"udp", "tcp"} {
		msg := new(dns.Msg)
		msg.SetQuestion(q.Name, q.Qtype) // with a random id, from a random port
		msg.SetEdns0(1232, false)
		client := dns.Client{Net: network, Timeout: 2 * time.Second}
		got, _, err := client.ExchangeContext(ctx, msg, server)
		switch {
		case err != nil:
			return nil, err
		case got.Id != msg.Id || !got.Response || len(got.Question) != 1 || got.Question[0].Qtype != q.Qtype || !strings.EqualFold(got.Question[0].Name, q.Name):
			return nil, errForged
		case !got.Truncated:
			return got, nil
		}
	}
	return nil, errors.New("its answer is cut off over TCP as well")
}
