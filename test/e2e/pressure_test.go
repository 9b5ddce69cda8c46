package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/forkd/forkd/client"
)

// TestGuestOutOfMemory lets guests take more memory than they have. What took it ends, with an error that says so; the guest stays in use,
// or its sandbox ends with a reason: it is never one that is listed as running and doesn't answer.
func TestGuestOutOfMemory(t *testing.T) {
	d := sharedDaemon(t)
	sibling := d.fork1()
	t.Run("a command", func(t *testing.T) {
		d := d.in(t)
		g := d.fork1()
		g.py("kept = 'kept'")
		res, err := g.exec(client.ExecRequest{Args: []string{"python3", "-c", "a = []\nwhile True: a.append(bytearray(b'x') * (1 << 20))"}})
		if err != nil || res.ExitCode == 0 {
			t.Errorf("command that takes all memory: got %+v, %v, want it to fail", res, err)
		}
		d.checkSandboxes(sibling, g)
		if got := g.sh("echo alive"); got != "alive" {
			t.Errorf("a command afterwards: %q", got)
		}
	})
	t.Run("the interpreter", func(t *testing.T) {
		d := d.in(t)
		g := d.fork1()
		res, err := g.eval(client.EvalRequest{Code: "a = []\nwhile True: a.append(bytearray(b'x') * (1 << 20))"})
		if err != nil || res.Error == nil {
			t.Errorf("code that takes all memory: got %+v, %v, want an error", res, err)
		}
		d.checkSandboxes(sibling, g)
		if got := g.py("6 * 7"); got != "42" {
			t.Errorf("6 * 7 afterwards: %s", got)
		}
	})
	t.Run("files", func(t *testing.T) {
		d := d.in(t)
		g := d.fork1()
		res, err := g.exec(client.ExecRequest{Args: []string{"dd", "if=/dev/zero", "of=/tmp/big", "bs=1M", "count=1000"}})
		ended := client.IsCode(err, "sandbox_gone") || client.IsCode(err, "guest_unreachable")
		if !ended && (err != nil || res.ExitCode == 0) {
			t.Errorf("file that takes all memory: got %+v, %v, want it to fail", res, err)
		}
		t.Logf("dd: exit code %d, %s %v", res.ExitCode, res.Stderr, err)
		if !ended {
			g.sh("rm /tmp/big; echo alive")
			d.checkSandboxes(sibling, g)
			return
		}
		d.checkTidy()
		d.checkSandboxes(sibling)
	})
	if got := sibling.py("6 * 7"); got != "42" {
		t.Errorf("6 * 7 in a sibling: %s", got)
	}
}

// TestClientsLeave: nobody knows of children whose client left before it was told of them, so they are ended; and a request that is
// repeated with its key makes nothing a second time.
func TestClientsLeave(t *testing.T) {
	d := sharedDaemon(t)
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan error, 1)
	go func() {
		_, err := d.client.Fork(ctx, client.ForkRequest{SnapshotTag: pyTag, N: client.Int(20)})
		left <- err
	}()
	eventually(t, callLimit, func() error {
		list, err := d.client.Sandboxes(t.Context(), false)
		if err == nil && len(list) < 3 {
			err = fmt.Errorf("%d children are being started", len(list))
		}
		return err
	})
	leave()
	if err := <-left; !errors.Is(err, context.Canceled) {
		t.Errorf("fork whose client left: %v", err)
	}
	eventually(t, tidyLimit, func() error {
		if ids := d.must("ls", "-q"); ids != "" {
			return fmt.Errorf("children of a client that left live on: %s", strings.Fields(ids))
		}
		return d.untidy()
	})

	key := client.WithIdempotencyKey(t.Context(), "the-same-"+t.Name())
	var ids [2][]string
	for i := range ids {
		list, err := d.client.Fork(key, client.ForkRequest{SnapshotTag: pyTag, N: client.Int(2)})
		if err != nil {
			t.Fatalf("fork with a key, time %d: %v", i+1, err)
		}
		for _, s := range list {
			ids[i] = append(ids[i], s.ID)
			d.guests = append(d.guests, &guest{s, d})
		}
	}
	d.guests = d.guests[:2]
	if !slices.Equal(ids[0], ids[1]) {
		t.Errorf("the same request with the same key made %v, then %v", ids[0], ids[1])
	}
	d.checkSandboxes(d.guests...)
}
