package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/forkd/forkd/client"
)

// NoisyOptions say how much noise is made, and how long it is listened to.
type NoisyOptions struct {
	Tag      string // "": the only snapshot that rests on no other
	Noisy    int    // sandboxes that make noise, at a time
	N        int    // requests of each kind, with and without noise
	Limits   client.Limits
	Noises   []string // names of those to make; none: all
	Progress func(format string, args ...any)
}

// NoisyReport is the outcome, as `forkd bench noisy --json` prints it.
type NoisyReport struct {
	Subject
	Noisy  int           `json:"noisy"`
	Limits client.Limits `json:"limits"`
	Noises []Noise       `json:"noises"`
}

// Noise is what requests of others took while guests made one kind of noise, and just before, while as many guests did nothing. Both are measured
// in turn, in several rounds, since the speed of a shared host changes.
type Noise struct {
	Noise     string     `json:"noise"`
	Quiet     NoisyPhase `json:"quiet"`
	Loud      NoisyPhase `json:"loud"`
	APIRatio  float64    `json:"api_p99_ratio"`
	PingRatio float64    `json:"ping_p99_ratio"`
	Ended     int        `json:"noisy_ended"` // of the noisy ones, by their limits
	Disturbed int        `json:"disturbed"`   // others that were ended: none is to be
}

// NoisyPhase is what was measured with, or without, noise.
type NoisyPhase struct {
	N        int     `json:"n"`
	Failed   int     `json:"failed"`
	Errors   []Count `json:"errors,omitempty"`
	APIMS    Millis  `json:"api_ms"`    // the daemon's own answers: a sandbox is looked up
	PingMS   Millis  `json:"ping_ms"`   // a sandbox that makes no noise answers
	ClientMS Millis  `json:"client_ms"` // how late this program is woken itself, which is in the others

	api, ping, client []time.Duration
	errs              map[string]int
}

// NoiseNames are the kinds of noise that there are.
func NoiseNames() (names []string) {
	for _, n := range noises() {
		names = append(names, n.name)
	}
	return names
}

// noises are what guests do, as shell commands that don't end by themselves.
func noises() []struct{ name, command string } {
	return []struct{ name, command string }{
		{"spins", "while :; do :; done"},
		{"forks", "b() { b | b & }; b; sleep 3600"},
		{"fills-memory", `while :; do head -c 1g /dev/zero | tail -c 1g >/dev/null; done`},
		{"fills-disk", `while :; do dd if=/dev/zero of=/tmp/big bs=1M 2>/dev/null; rm -f /tmp/big; done`},
		{"floods-network", `while :; do for p in 1 2 3; do (echo x >/dev/udp/255.255.255.255/$p) 2>/dev/null; done; done`},
	}
}

// noisyRounds is how often noise and quiet take turns.
const noisyRounds = 4

// Noisy measures what guests that do their worst do to others. What it starts it ends.
func Noisy(ctx context.Context, c *client.Client, opt NoisyOptions) (r NoisyReport, err error) {
	if opt.Progress == nil {
		opt.Progress = func(string, ...any) {}
	}
	subject, err := subjectOf(ctx, c, opt.Tag)
	if err != nil {
		return NoisyReport{}, err
	}
	opt.Tag = subject.Tag
	r = NoisyReport{Subject: subject, Noisy: opt.Noisy, Limits: opt.Limits}
	quiet, err := c.Fork(ctx, client.ForkRequest{SnapshotTag: opt.Tag})
	defer func() { err = errors.Join(err, KillAll(context.WithoutCancel(ctx), c, childrenOf(quiet))) }()
	if err != nil {
		return r, err
	}
	// Both ways go through code that runs for the first time.
	listen(ctx, c, quiet[0].ID, opt.N/10, &NoisyPhase{})
	for _, n := range noises() {
		if len(opt.Noises) > 0 && !slices.Contains(opt.Noises, n.name) {
			continue
		}
		opt.Progress("%d sandboxes: each %s, and each does nothing, in turn", opt.Noisy, n.name)
		noise := Noise{Noise: n.name}
		for range noisyRounds {
			if err := noisyRound(ctx, c, opt, quiet[0].ID, n.command, &noise); err != nil {
				return r, fmt.Errorf("%s: %w", n.name, err)
			}
		}
		noise.Quiet.sum()
		noise.Loud.sum()
		noise.APIRatio, noise.PingRatio = ratio(noise.Loud.APIMS.P99, noise.Quiet.APIMS.P99), ratio(noise.Loud.PingMS.P99, noise.Quiet.PingMS.P99)
		noise.Disturbed = ended(ctx, c, quiet)
		r.Noises = append(r.Noises, noise)
	}
	return r, nil
}

// How long what has just begun is let settle before anything is measured.
const (
	noiseGrace = 2 * time.Second
	quietGrace = 500 * time.Millisecond
)

// noisyRound starts sandboxes, asks for things of the daemon and of another one, has them make noise, and asks again.
func noisyRound(ctx context.Context, c *client.Client, opt NoisyOptions, quiet, command string, into *Noise) (err error) {
	ctx, stop := context.WithCancel(ctx)
	var noise sync.WaitGroup
	noisy, err := c.Fork(ctx, client.ForkRequest{SnapshotTag: opt.Tag, N: client.Int(opt.Noisy), Limits: &opt.Limits})
	defer func() {
		stop()
		err = errors.Join(err, KillAll(context.WithoutCancel(ctx), c, childrenOf(noisy)))
		noise.Wait()
	}()
	if err != nil || !pause(ctx, quietGrace) {
		return errors.Join(err, ctx.Err())
	}
	listen(ctx, c, quiet, opt.N/noisyRounds, &into.Quiet)
	for _, s := range noisy {
		noise.Go(func() { // ends with its sandbox
			_, _ = c.Exec(ctx, s.ID, client.ExecRequest{Args: []string{"bash", "-c", command}, Timeout: time.Hour})
		})
	}
	if !pause(ctx, noiseGrace) {
		return context.Cause(ctx)
	}
	listen(ctx, c, quiet, opt.N/noisyRounds, &into.Loud)
	into.Ended += ended(ctx, c, noisy)
	return ctx.Err()
}

func childrenOf(boxes []client.Sandbox) (all []Child) {
	for _, s := range boxes {
		all = append(all, Child{ID: s.ID})
	}
	return all
}

// pause waits, and says whether it did to the end.
func pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

// thinking is how long nothing is asked between two requests, as clients do.
const thinking = 2 * time.Millisecond

// listen asks n times, one after the other.
func listen(ctx context.Context, c *client.Client, id string, n int, p *NoisyPhase) {
	if p.errs == nil {
		p.errs = map[string]int{}
	}
	timed := func(into *[]time.Duration, do func() error) {
		begin := time.Now()
		time.Sleep(thinking)
		p.client = append(p.client, time.Since(begin)-thinking)
		begin = time.Now()
		if err := do(); err != nil {
			p.Failed++
			p.errs[err.Error()]++
			return
		}
		*into = append(*into, time.Since(begin))
	}
	for range n {
		if ctx.Err() != nil {
			return
		}
		p.N++
		timed(&p.api, func() error { _, err := c.Sandbox(ctx, id); return err })
		timed(&p.ping, func() error { _, err := c.Ping(ctx, id); return err })
	}
}

// sum makes the figures of what was measured.
func (p *NoisyPhase) sum() {
	for text, n := range p.errs {
		p.Errors = append(p.Errors, Count{text, n})
	}
	slices.SortFunc(p.Errors, func(a, b Count) int { return b.Count - a.Count })
	p.APIMS, p.PingMS, p.ClientMS = millis(p.api), millis(p.ping), millis(p.client)
}

// ended counts those of the sandboxes that don't run any more.
func ended(ctx context.Context, c *client.Client, boxes []client.Sandbox) (n int) {
	for _, b := range boxes {
		if s, err := c.Sandbox(ctx, b.ID); err != nil || s.State != "running" {
			n++
		}
	}
	return n
}
