package main

import (
	"fmt"
	"sync"
	"syscall"
	"testing"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/client"
)

// TestKeysSurviveKill kills the daemon while keys are made and revoked: every key that somebody was given is good afterwards, and every one whose
// revocation was answered is not.
func TestKeysSurviveKill(t *testing.T) {
	dir := shortDir(t)
	first := startServed(t, dir, "--listen", "")
	admin, err := client.New(client.Config{URL: dir + "/run/forkd.sock"})
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	good, revoked := map[string]string{}, map[string]string{} // tokens by id
	enough := make(chan struct{})
	var said sync.Once
	var all sync.WaitGroup
	for worker := range 4 {
		all.Go(func() {
			for i := 0; ; i++ {
				k, err := admin.CreateKey(t.Context(), client.KeyRequest{Name: fmt.Sprintf("k%d-%d", worker, i), Scope: api.KeyScopeRun})
				if err != nil {
					return // the daemon is gone
				}
				mu.Lock()
				good[k.Key.ID] = k.Token
				n := len(good) + len(revoked)
				mu.Unlock()
				if n >= 40 {
					said.Do(func() { close(enough) })
				}
				if i%2 == 0 {
					continue
				}
				mu.Lock()
				delete(good, k.Key.ID) // until it is known what has become of it
				mu.Unlock()
				if err := admin.RevokeKey(t.Context(), k.Key.ID); err != nil {
					return
				}
				mu.Lock()
				revoked[k.Key.ID] = k.Token
				mu.Unlock()
			}
		})
	}
	<-enough
	first.kill()
	all.Wait()
	second := startServed(t, dir, "--listen", "127.0.0.1:0")
	check := func(tokens map[string]string, want string) {
		t.Helper()
		for id, token := range tokens {
			c, err := client.New(client.Config{URL: "http://" + second.listening(), Token: token})
			if err != nil {
				t.Fatal(err)
			}
			_, err = c.Sandboxes(t.Context(), false)
			if (want == "" && err != nil) || (want != "" && !client.IsCode(err, want)) {
				t.Errorf("key %s: %v, want %q", id, err, want)
			}
			c.Close()
		}
	}
	check(good, "")
	check(revoked, "unauthorized")
	if len(good) == 0 || len(revoked) == 0 {
		t.Errorf("%d good keys and %d revoked ones were tried", len(good), len(revoked))
	}
}

// kill ends the daemon at once.
func (d *servedDaemon) kill() {
	d.t.Helper()
	_ = d.cmd.Process.Signal(syscall.SIGKILL)
	_ = d.cmd.Wait()
	d.killed = true
}
