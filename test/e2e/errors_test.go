package e2e

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/forkd/forkd/client"
)

// wantError checks an error of the daemon: its status, its code, and that its message has the words.
func wantError(t *testing.T, what string, err error, status int, code string, words ...string) {
	t.Helper()
	var e *client.Error
	if !errors.As(err, &e) {
		t.Errorf("%s: got %v, want an error with code %s", what, err, code)
		return
	}
	if e.Status != status || e.Code != code {
		t.Errorf("%s: got %d %s: %v, want %d %s", what, e.Status, e.Code, e, status, code)
	}
	for _, word := range words {
		if !strings.Contains(e.Message, word) {
			t.Errorf("%s: the message lacks %q: %s", what, word, e.Message)
		}
	}
	if e.RequestID == "" {
		t.Errorf("%s: the error has no request id", what)
	}
}

// checkSandboxes checks that exactly these live, and that each of them answers.
func (d *daemon) checkSandboxes(want ...*guest) {
	d.t.Helper()
	ctx, cancel := d.limited()
	defer cancel()
	list, err := d.client.Sandboxes(ctx, false)
	if err != nil {
		d.t.Fatalf("list the sandboxes: %v", err)
	}
	var got, wanted []string
	for _, s := range list {
		got = append(got, s.ID)
	}
	for _, g := range want {
		wanted = append(wanted, g.ID)
	}
	slices.Sort(got)
	slices.Sort(wanted)
	if !slices.Equal(got, wanted) {
		d.t.Errorf("sandboxes that live: got %v, want %v", got, wanted)
	}
	for _, g := range want {
		if err := g.ping(); err != nil {
			d.t.Errorf("ping of %v: %v", g, err)
		}
	}
}
