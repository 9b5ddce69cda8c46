package hostnet

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sync/errgroup"

	"github.com/forkd/forkd/internal/netpolicy"
)

// Config is what a Network works with.
type Config struct {
	Name    string       // of the host's table: no other daemon on this host has it
	Range   netip.Prefix // a /16 for the slots' own addresses; the zero value is for DefaultRange
	Ready   int          // slots to keep ready
	Servers []string     // name servers, HOST or HOST:PORT; none: those of the host's /etc/resolv.conf
	Log     *slog.Logger
}

// DefaultRange is where slots have their own addresses.
var DefaultRange = netip.MustParsePrefix("10.118.0.0/16")

// makersAtOnce is how many slots are made at the same time: the kernel makes them one after the other anyway.
const makersAtOnce = 2

// Network makes slots.
type Network struct {
	cfg      Config
	log      *slog.Logger
	upstream *upstream

	life context.Context
	end  context.CancelFunc
	work sync.WaitGroup

	hostMu sync.Mutex // guards conn, opened and stale
	conn   *nftables.Conn
	opened map[int]opened
	stale  []nftables.SetElement // devices of an earlier daemon's slots

	mu    sync.Mutex
	host  []netip.Addr
	next  int
	ready []*Slot
	live  map[*Slot]bool
	want  chan struct{} // slots may be missing
}

// Open makes the host's rules and begins to make slots. What an earlier daemon of that name had made of rules is replaced.
func Open(cfg Config) (*Network, error) {
	if !cfg.Range.IsValid() {
		cfg.Range = DefaultRange
	}
	if cfg.Range.Bits() != 16 || !cfg.Range.Addr().Is4() {
		return nil, fmt.Errorf("network range %s: give a /16 of IPv4 that nothing else on this host uses", cfg.Range)
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	n := &Network{cfg: cfg, log: cfg.Log, upstream: newUpstream(cfg.Servers), opened: map[int]opened{}, live: map[*Slot]bool{},
		next: rand.IntN(maxSlots), want: make(chan struct{}, 1)}
	n.life, n.end = context.WithCancel(context.Background())
	if err := Check(); err != nil {
		return nil, err
	}
	var err error
	if n.host, err = readHostAddrs(); err != nil {
		return nil, err
	}
	if n.conn, err = nftables.New(nftables.AsLasting()); err != nil {
		return nil, fmt.Errorf("nftables: %w", err)
	}
	if err := n.makeHostTable(); err != nil {
		return nil, errors.Join(fmt.Errorf("nftables rules of the host: %w", err), n.conn.CloseLasting())
	}
	if err := setSysctls(map[string]string{"ipv4/ip_forward": "1"}); err != nil {
		return nil, errors.Join(err, n.conn.CloseLasting())
	}
	// One slot shows whether this kernel can do all that is needed.
	s, err := n.makeSlot()
	if err != nil {
		return nil, errors.Join(err, n.conn.CloseLasting())
	}
	n.ready = append(n.ready, s)
	return n, nil
}

// Start begins to keep slots ready, once those that live were adopted.
func (n *Network) Start() {
	if err := n.dropStale(); err != nil {
		n.log.Warn("old devices stay under the host's rules", "error", err)
	}
	for range makersAtOnce {
		n.work.Go(n.makeAhead)
	}
	n.work.Go(n.followAddrs)
	n.nudge()
}

// Check says why this process can have no networks, as far as that can be told without making one.
func Check() error {
	if os.Geteuid() != 0 {
		return errors.New("network namespaces and nftables need root")
	}
	f, err := os.OpenFile("/dev/net/tun", os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("taps can't be made (modprobe tun may help): %w", err)
	}
	return f.Close()
}

// Try makes what a network needs that may fail on a host, and takes it back. The host itself is left as it is.
func Try() error {
	if err := Check(); err != nil {
		return err
	}
	ns, tap, err := newNamespace()
	if err != nil {
		return err
	}
	s := &Slot{ns: ns, tap: tap}
	defer s.let()
	if s.conn, err = nftables.New(nftables.WithNetNSFd(int(ns.Fd())), nftables.AsLasting()); err != nil {
		return fmt.Errorf("nftables: %w", err)
	}
	if err := setUpTap(ns); err != nil {
		return err
	}
	if err := makeTables(s.conn, nil); err != nil {
		return fmt.Errorf("nftables rules: %w", err)
	}
	return nil
}

func (n *Network) nextNumber() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.next = n.next%maxSlots + 1
	return n.next
}

func (n *Network) hostAddrs() []netip.Addr {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.host
}

func (n *Network) nudge() {
	select {
	case n.want <- struct{}{}:
	default:
	}
}

// Acquire hands out a slot that nothing passes. It takes one that is ready, and else waits until one is made.
func (n *Network) Acquire(ctx context.Context) (*Slot, error) {
	n.mu.Lock()
	if last := len(n.ready) - 1; last >= 0 {
		s := n.ready[last]
		n.ready = n.ready[:last]
		n.live[s] = true
		n.mu.Unlock()
		n.nudge()
		return s, nil
	}
	n.mu.Unlock()
	s, err := n.makeSlot()
	if err != nil {
		return nil, fmt.Errorf("make a network: %w", err)
	}
	if ctx.Err() != nil {
		s.destroy()
		return nil, context.Cause(ctx)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.live[s] = true
	n.nudge()
	return s, nil
}

// Ready is how many slots wait to be used.
func (n *Network) Ready() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.ready)
}

// makeRest is how long a maker rests after it failed.
const makeRest = 5 * time.Second

// makeAhead keeps slots ready until the end.
func (n *Network) makeAhead() {
	for {
		n.mu.Lock()
		missing := len(n.ready) < n.cfg.Ready
		n.mu.Unlock()
		if !missing {
			select {
			case <-n.want:
				continue
			case <-n.life.Done():
				return
			}
		}
		s, err := n.makeSlot()
		if err != nil {
			n.log.Warn("a network could not be made ahead", "error", err, "again_in", makeRest)
			select {
			case <-time.After(makeRest):
				continue
			case <-n.life.Done():
				return
			}
		}
		n.mu.Lock()
		n.ready = append(n.ready, s)
		n.mu.Unlock()
		if n.life.Err() != nil {
			return
		}
		n.nudge() // the other maker may have slept through it
	}
}

// retire throws a slot away, in the background.
func (n *Network) retire(s *Slot) {
	n.mu.Lock()
	delete(n.live, s)
	n.mu.Unlock()
	n.work.Go(s.destroy)
}

// followAddrs keeps what slots know of the host's addresses right.
func (n *Network) followAddrs() {
	updates := make(chan netlink.AddrUpdate, 64)
	if err := netlink.AddrSubscribe(updates, n.life.Done()); err != nil {
		n.log.Warn("changes of the host's addresses are not seen: the host's own rules go on to keep sandboxes from them", "error", err)
		return
	}
	for {
		select {
		case _, more := <-updates:
			if !more {
				return
			}
			n.refreshAddrs()
		case <-n.life.Done():
			return
		}
	}
}

func (n *Network) refreshAddrs() {
	host, err := readHostAddrs()
	if err != nil {
		n.log.Warn("read the host's addresses", "error", err)
		return
	}
	n.mu.Lock()
	same := slices.Equal(n.host, host)
	n.host = host
	slots := append([]*Slot{}, n.ready...)
	for s := range n.live {
		slots = append(slots, s)
	}
	n.mu.Unlock()
	if same {
		return
	}
	for _, s := range slots {
		if err := s.setHostAddrs(host); err != nil {
			n.log.Warn("tell a network the host's addresses", "error", err)
		}
	}
}

// setHostAddrs makes addresses those of the host, for a slot's rules. A policy that names one of them is applied anew.
func (s *Slot) setHostAddrs(host []netip.Addr) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.released {
		return nil
	}
	s.conn.FlushSet(hostElements())
	if err := s.conn.SetAddElements(hostElements(), addrElements(host)); err != nil {
		return err
	}
	if err := s.conn.Flush(); err != nil {
		return err
	}
	if s.applied == nil || s.applied.policy.Mode != netpolicy.Allow {
		return nil
	}
	return s.setLocked(s.applied.policy)
}

const closersAtOnce = 32

// Close stops the making of slots and throws those away that nobody uses. Networks of machines that live go on without us.
func (n *Network) Close() error {
	n.end()
	n.work.Wait()
	n.mu.Lock()
	ready, live := n.ready, n.live
	n.ready, n.live = nil, map[*Slot]bool{}
	n.mu.Unlock()
	n.unplugAll(ready)
	var gone errgroup.Group // closing a connection to nftables waits for the kernel's readers
	gone.SetLimit(closersAtOnce)
	for _, s := range ready {
		gone.Go(func() error { s.destroy(); return nil })
	}
	_ = gone.Wait()
	for s := range live {
		s.mu.Lock()
		s.released = true
		s.let()
		s.mu.Unlock()
	}
	n.hostMu.Lock()
	defer n.hostMu.Unlock()
	if len(live) == 0 {
		n.conn.DelTable(n.hostTable())
		if err := n.conn.Flush(); err != nil {
			return errors.Join(fmt.Errorf("remove the host's rules: %w", err), n.conn.CloseLasting())
		}
	}
	return n.conn.CloseLasting()
}
