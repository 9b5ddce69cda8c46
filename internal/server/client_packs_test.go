package server

import (
	"bytes"
	"crypto/ed25519"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/forkd/forkd/client"
	"github.com/forkd/forkd/internal/sandbox"
	"github.com/forkd/forkd/internal/transfer"
)

func TestClientPacks(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	c := newClient(t, f)
	pack, err := c.Pack(t.Context(), "py", client.PackOptions{Sign: func(contents []byte) ([]byte, error) {
		return append([]byte("signed "), contents...), nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer pack.Close()
	if data, err := io.ReadAll(pack); err != nil || string(data) != stubPack {
		t.Errorf("pack = %q, %v", data, err)
	}
	if diff := cmp.Diff([]string{`signed {"id": "s1"}`}, f.signatures); diff != "" {
		t.Errorf("signatures (-want +got):\n%s", diff)
	}
	_, err = c.Pack(t.Context(), "py", client.PackOptions{Sign: func([]byte) ([]byte, error) { return nil, errNoKey }})
	if !errors.Is(err, errNoKey) {
		t.Errorf("err = %v, want %v", err, errNoKey)
	}

	public, header := newSigner(t)
	sent := &closeCounter{Reader: strings.NewReader(stubPack)}
	res, err := c.Unpack(t.Context(), sent, client.UnpackOptions{Tag: "new", Signers: []ed25519.PublicKey{public}})
	if err != nil || res.Snapshot.Tag != "new" || res.SignedBy == nil || *res.SignedBy != header {
		t.Errorf("Unpack() = %+v, %v", res, err)
	}
	if sent.closed != 0 {
		t.Error("Unpack() closed what it was given to read")
	}
	if diff := cmp.Diff([]string{stubPack}, f.unpacked); diff != "" {
		t.Errorf("bodies (-want +got):\n%s", diff)
	}
}

var errNoKey = errors.New("no key")

// TestClientPackFails holds that a pack is never taken for whole that isn't, and that its errors are the daemon's.
func TestClientPackFails(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.packBreaks = true
	c := newClient(t, f)
	pack, err := c.Pack(t.Context(), "py", client.PackOptions{})
	if err == nil {
		_, err = io.ReadAll(pack)
		pack.Close()
	}
	if !client.IsCode(err, client.CodeBrokenOff) && !client.IsCode(err, client.CodeNoDaemon) { // the head may be lost too
		t.Errorf("err = %v, want that it broke off", err)
	}

	f = newFixture(t)
	f.fail = &sandbox.Error{Code: sandbox.CodeSnapshotExists, Message: "in use"}
	c = newClient(t, f)
	if _, err := c.Pack(t.Context(), "py", client.PackOptions{}); !client.IsCode(err, "snapshot_exists") {
		t.Errorf("err = %v, want the daemon's", err)
	}
	untouched := readerFunc(func([]byte) (int, error) {
		t.Error("a pack was sent that was refused before")
		return 0, io.EOF
	})
	if _, err := c.Unpack(t.Context(), untouched, client.UnpackOptions{Tag: "t"}); !client.IsCode(err, "snapshot_exists") {
		t.Errorf("err = %v, want the daemon's", err)
	}
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(b []byte) (int, error) { return f(b) }

// TestClientUnpackRefusedOnTheWay holds that a client that still sends sees why its pack is refused.
func TestClientUnpackRefusedOnTheWay(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.unpack = func(r io.Reader, _ func(sandbox.Progress)) (transfer.Unpacked, error) {
		if _, err := io.ReadFull(r, make([]byte, 100)); err != nil {
			return transfer.Unpacked{}, err
		}
		return transfer.Unpacked{}, &sandbox.Error{Code: transfer.CodeInvalidPack, Message: "no pack"}
	}
	_, err := newClient(t, f).Unpack(t.Context(), io.LimitReader(repeat('x'), 200<<20), client.UnpackOptions{})
	if !client.IsCode(err, "invalid_pack") {
		t.Errorf("err = %v, want invalid_pack", err)
	}
}

func TestClientForkRunningPartly(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.forkRunning = func(sandbox.ForkRunningRequest) (sandbox.ForkRunningResult, error) {
		sb := stubSandbox(0)
		return sandbox.ForkRunningResult{Results: []sandbox.ForkResult{{Err: &sandbox.Error{Code: sandbox.CodeTimeout, Message: "too slow"}}, {Sandbox: &sb}}}, nil
	}
	got, err := newClient(t, f).ForkRunning(t.Context(), "sb0", client.ForkRunningRequest{N: client.Int(2)})
	var partial *client.PartialError
	if !errors.As(err, &partial) || len(got.Sandboxes) != 1 || partial.Failures[0].Code != "timeout" {
		t.Errorf("= %+v, %v", got, err)
	}
}

func TestClientEvents(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	stream, err := newClient(t, f).Events(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	f.server.Events.Publish(sandbox.Event{Tenant: sandbox.DefaultTenant, Time: stubTime, Kind: sandbox.EventSnapshotReady, Tag: "b1"})
	f.server.Events.Publish(sandbox.Event{Tenant: sandbox.DefaultTenant, Time: stubTime, Kind: sandbox.EventSandboxState, SandboxID: "sb0", State: sandbox.StateRunning})
	f.server.Events.Close()
	want := []client.Event{{Kind: "snapshot_ready", Tag: "b1", TimeUnixMS: stubTime.UnixMilli()}, {Kind: "sandbox_state", SandboxID: "sb0", State: "running", TimeUnixMS: stubTime.UnixMilli()}}
	var got []client.Event
	for event, err := range stream.All() {
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, event)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

func TestClientEventsFail(t *testing.T) {
	t.Parallel()
	f := newFixture(t, func(c *Config) { c.Token = "0123456789abcdef" })
	c, err := client.New(client.Config{URL: f.http.URL, Token: "wrong"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Events(t.Context()); !client.IsCode(err, "unauthorized") {
		t.Errorf("err = %v, want unauthorized", err)
	}
	if _, err := c.Unpack(t.Context(), bytes.NewReader(nil), client.UnpackOptions{}); !client.IsCode(err, "unauthorized") {
		t.Errorf("err = %v, want unauthorized", err)
	}
}

// closeCounter counts how often it was closed.
type closeCounter struct {
	io.Reader
	closed int
}

func (c *closeCounter) Close() error {
	c.closed++
	return nil
}
