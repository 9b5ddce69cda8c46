package sandbox

import (
	"context"
	"errors"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/forkd/forkd/internal/failpoint"
	"github.com/forkd/forkd/internal/netpolicy"
	"github.com/forkd/forkd/internal/vmm"
)

// testNetworks are networks that lead nowhere, and remember what they were told to hold.
type testNetworks struct {
	mu  sync.Mutex
	set []netpolicy.Policy // in order, of all networks
}

// policies returns what was set, and forgets it.
func (n *testNetworks) policies() []netpolicy.Policy {
	n.mu.Lock()
	defer n.mu.Unlock()
	all := n.set
	n.set = nil
	return all
}

func (n *testNetworks) Acquire(context.Context) (Network, error) { return &testNetwork{all: n}, nil }
func (n *testNetworks) KernelWord() string                       { return "net" }
func (n *testNetworks) Adopt(_ int, p netpolicy.Policy) (Network, error) {
	return &testNetwork{all: n, holds: p}, nil
}

type testNetwork struct {
	all   *testNetworks
	holds netpolicy.Policy // all.mu guards it
}

func (n *testNetwork) SetPolicy(_ context.Context, p netpolicy.Policy) error {
	n.all.mu.Lock()
	defer n.all.mu.Unlock()
	n.holds = p
	n.all.set = append(n.all.set, p)
	return nil
}

func (n *testNetwork) Status() (netpolicy.Status, error) {
	n.all.mu.Lock()
	defer n.all.mu.Unlock()
	return netpolicy.Status{Policy: n.holds}, nil
}

func (n *testNetwork) NIC() *vmm.NIC     { return nil }
func (n *testNetwork) Started()          {}
func (n *testNetwork) GuestAddr() string { return "10.117.0.2" }
func (n *testNetwork) Release()          {}
func (n *testNetwork) Dial(context.Context, int) (net.Conn, error) {
	return nil, errors.New("nobody listens")
}

var (
	reachAll  = netpolicy.Policy{Mode: netpolicy.Open}
	reachNone = netpolicy.Policy{Mode: netpolicy.None}
)

// holds is what the network of a sandbox holds.
func (d *daemon) holds(t *testing.T, id string) netpolicy.Policy {
	t.Helper()
	st, err := d.NetworkStatus(t.Context(), id)
	if err != nil {
		t.Fatalf("NetworkStatus %s: %v", id, err)
	}
	return st.Policy
}

// TestPrivilegeStaysWithItsTenant makes things of a shared snapshot that may open what is protected: another tenant's may not, nor may the steps that
// it runs on the way.
func TestPrivilegeStaysWithItsTenant(t *testing.T) {
	networks := &testNetworks{}
	d := newWorld(t).start(t, options{networks: networks})
	policy := netpolicy.Policy{Mode: netpolicy.Allow, Rules: []string{"169.254.169.254"}, Privileged: true}
	d.snapshot(t, "base", func(r *SnapshotRequest) { r.Network = policy })
	if _, err := d.ShareSnapshot(t.Context(), "base", true); err != nil {
		t.Fatal(err)
	}
	for _, tenant := range []string{DefaultTenant, "acme"} {
		want := policy
		want.Privileged = tenant == DefaultTenant
		ctx := WithCaller(t.Context(), Caller{Tenant: tenant})
		networks.policies()
		if _, err := d.Compact(ctx, "base", "alone"); err != nil {
			t.Fatalf("%s: Compact: %v", tenant, err)
		}
		if _, err := d.SnapshotDiff(ctx, DiffRequest{From: "base", Tag: "more", Steps: []WarmUp{{Kind: WarmUpExec, Code: "true"}}}, nil); err != nil {
			t.Fatalf("%s: SnapshotDiff: %v", tenant, err)
		}
		for _, tag := range []string{"base", "alone", "more"} {
			if res, err := d.Fork(ctx, ForkRequest{Tag: tag, N: 1}); err != nil || res[0].Err != nil {
				t.Fatalf("%s: fork of %s: %v, %v", tenant, tag, res, err)
			}
			if s, err := d.Snapshot(ctx, tag); err != nil || tag != "base" && s.Network.Privileged != want.Privileged {
				t.Errorf("%s: snapshot %s: got %+v, %v, want privileged %v", tenant, tag, s.Network, err, want.Privileged)
			}
		}
		// The machine of the steps, and three children.
		if diff := cmp.Diff([]netpolicy.Policy{want, want, want, want}, networks.policies()); diff != "" {
			t.Errorf("%s: what machines may reach (-want +got):\n%s", tenant, diff)
		}
	}
}

// TestPolicyDuringResume sets a policy while the machine that it is for is being started: whoever is told that it is set must find it held.
func TestPolicyDuringResume(t *testing.T) {
	points := failpoint.New()
	d := newWorld(t).start(t, options{networks: &testNetworks{}, failpoints: points})
	d.snapshot(t, "base", nil)
	box := d.fork(t, "base", 1, func(r *ForkRequest) { r.Network = &reachAll })[0]
	d.suspend(t, box.ID)
	if _, err := d.SetNetwork(t.Context(), box.ID, reachAll); err != nil { // nothing is in the way of that
		t.Fatal(err)
	}
	set := make(chan error, 1)
	points.On(pointResumeIdentified, 1, func(ctx context.Context) error {
		go func() {
			_, err := d.SetNetwork(context.WithoutCancel(ctx), box.ID, reachNone)
			set <- err
		}()
		select {
		case err := <-set:
			set <- err // at once: it must be held all the same
		case <-time.After(time.Second): // it waits for us
		}
		return nil
	})
	d.resume(t, box.ID)
	if err := <-set; err != nil {
		t.Fatalf("SetNetwork: %v", err)
	}
	if got := d.holds(t, box.ID); !got.IsNone() {
		t.Errorf("after none was set during a resumption its network holds %s", got)
	}
}

// TestPolicyWithoutNetworks changes policies with a daemon that has no networks: those of machines that had one before it came can't be changed, and
// nobody may be told that they were.
func TestPolicyWithoutNetworks(t *testing.T) {
	w := newWorld(t)
	d := w.start(t, options{networks: &testNetworks{}})
	d.snapshot(t, "base", nil)
	before := d.fork(t, "base", 1, func(r *ForkRequest) { r.Network = &reachAll })[0]
	d.stop(t)
	d = w.start(t, options{})
	_, err := d.SetNetwork(t.Context(), before.ID, reachNone)
	checkCode(t, "none for a sandbox that has a network", err, CodeNetworkUnavailable)
	if got := d.holds(t, before.ID); got.Mode != netpolicy.Open {
		t.Errorf("what it may reach: got %s, want open as before", got)
	}
	after := d.fork(t, "base", 1, func(r *ForkRequest) { r.Network = &reachNone })[0]
	if _, err := d.SetNetwork(t.Context(), after.ID, reachNone); err != nil {
		t.Errorf("none for a sandbox that was never plugged in: %v", err)
	}
	d.stop(t)
	d = w.start(t, options{networks: &testNetworks{}})
	if _, err := d.SetNetwork(t.Context(), before.ID, reachNone); err != nil {
		t.Errorf("none, with networks again: %v", err)
	}
	if got := d.holds(t, before.ID); !got.IsNone() {
		t.Errorf("what it may reach: got %s, want none", got)
	}
}
