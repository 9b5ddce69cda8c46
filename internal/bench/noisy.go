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
	N        int    // requests in each round
	Limits   client.Limits
	Progress func(format string, args ...any)
}

// NoisyReport is the outcome, as `forkd bench noisy --json` prints it.
type NoisyReport struct {
	Subject
	Noisy  int           `json:"noisy"`
	Limits client.Limits `json:"limits"`
	Quiet  NoisyRound    `json:"quiet"` // the same requests, with as many sandboxes that do nothing
	Rounds []NoisyRound  `json:"rounds"`
}

// NoisyRound is what requests of others took while guests made one kind of noise.
type NoisyRound struct {
	Noise     string  `json:"noise"`
	N         int     `json:"n"`
	Failed    int     `json:"failed"`
	Errors    []Count `json:"errors,omitempty"`
	APIMS     Millis  `json:"api_ms"`  // the daemon's own answers: a sandbox is looked up
	PingMS    Millis  `json:"ping_ms"` // a sandbox that makes no noise answers
	APIRatio  float64 `json:"api_p99_ratio,omitempty"`
	PingRatio float64 `json:"ping_p99_ratio,omitempty"`
	Ended     int     `json:"noisy_ended"` // of the noisy ones, by their limits
	Disturbed int     `json:"disturbed"`   // others that were ended: none is to be
}

// noises are what guests do, as shell commands that don't end by themselves.
func noises() []struct{ name, command string } {
	return []struct{ name, command string }{
		{"spins", "while :; do :; done"},
		{"fork bomb", "b() { b | b & }; b; sleep 3600"},
		{"fills memory", `while :; do head -c 1g /dev/zero | tail -c 1g >/dev/null; done`},
		{"fills its disk", `while :; do dd if=/dev/zero of=/tmp/big bs=1M 2>/dev/null; rm -f /tmp/big; done`},
		{"floods the network", `while :; do for p in 1 2 3; do (echo x >/dev/udp/255.255.255.255/$p) 2>/dev/null; done; done`},
	}
}

// Noisy measures what guests that do their worst do to others. What it starts it ends.
func Noisy(ctx context.Context, c *client.Client, opt NoisyOptions) (NoisyReport, error) {
	if opt.Progress == nil {
		opt.Progress = func(string, ...any) {}
	}
	subject, err := subjectOf(ctx, c, opt.Tag)
	if err != nil {
		return NoisyReport{}, err
	}
	opt.Tag = subject.Tag
	r := NoisyReport{Subject: subject, Noisy: opt.Noisy, Limits: opt.Limits}
	opt.Progress("listening to %d sandboxes that do nothing", opt.Noisy)
	if r.Quiet, err = noisyRound(ctx, c, opt, "nothing", "sleep 3600"); err != nil {
		return r, err
	}
	for _, n := range noises() {
		opt.Progress("%d sandboxes: each %s", opt.Noisy, n.name)
		round, err := noisyRound(ctx, c, opt, n.name, n.command)
		if err != nil {
			return r, fmt.Errorf("%s: %w", n.name, err)
		}
		round.APIRatio, round.PingRatio = ratio(round.APIMS.P99, r.Quiet.APIMS.P99), ratio(round.PingMS.P99, r.Quiet.PingMS.P99)
		r.Rounds = append(r.Rounds, round)
	}
	return r, nil
}

// noiseGrace is how long the noise is let grow before anything is measured.
const noiseGrace = 2 * time.Second

// noisyRound starts noisy sandboxes and a quiet one, and asks for things of the daemon and of the quiet one.
func noisyRound(ctx context.Context, c *client.Client, opt NoisyOptions, name, command string) (round NoisyRound, err error) {
	round.Noise = name
	ctx, stop := context.WithCancel(ctx)
	var made []Child
	var noise sync.WaitGroup
	defer func() {
		stop()
		err = errors.Join(err, KillAll(context.WithoutCancel(ctx), c, made))
		noise.Wait()
	}()
	quiet, err := c.Fork(ctx, client.ForkRequest{SnapshotTag: opt.Tag})
	for _, s := range quiet {
		made = append(made, Child{ID: s.ID})
	}
	if err != nil {
		return round, err
	}
	noisy, err := c.Fork(ctx, client.ForkRequest{SnapshotTag: opt.Tag, N: client.Int(opt.Noisy), Limits: &opt.Limits})
	for _, s := range noisy {
		made = append(made, Child{ID: s.ID})
	}
	if err != nil {
		return round, err
	}
	for _, s := range noisy {
		noise.Go(func() { // ends with its sandbox
			_, _ = c.Exec(ctx, s.ID, client.ExecRequest{Args: []string{"bash", "-c", command}, Timeout: time.Hour})
		})
	}
	select {
	case <-time.After(noiseGrace):
	case <-ctx.Done():
		return round, context.Cause(ctx)
	}
	listen(ctx, c, quiet[0].ID, opt.N, &round)
	round.Ended, round.Disturbed = ended(ctx, c, noisy), ended(ctx, c, quiet)
	return round, ctx.Err()
}

// listen asks n times, one after the other.
func listen(ctx context.Context, c *client.Client, id string, n int, round *NoisyRound) {
	var api, ping []time.Duration
	errs := map[string]int{}
	timed := func(into *[]time.Duration, do func() error) {
		begin := time.Now()
		if err := do(); err != nil {
			round.Failed++
			errs[err.Error()]++
			return
		}
		*into = append(*into, time.Since(begin))
	}
	for range n {
		round.N++
		timed(&api, func() error { _, err := c.Sandbox(ctx, id); return err })
		timed(&ping, func() error { _, err := c.Ping(ctx, id); return err })
	}
	for text, n := range errs {
		round.Errors = append(round.Errors, Count{text, n})
	}
	slices.SortFunc(round.Errors, func(a, b Count) int { return b.Count - a.Count })
	round.APIMS, round.PingMS = millis(api), millis(ping)
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
