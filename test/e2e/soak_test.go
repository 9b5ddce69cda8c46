package e2e

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/client"
)

// metrics are the daemon's figures by name and labels, as GET /metrics has them.
func (d *daemon) metrics() map[string]float64 {
	d.t.Helper()
	ctx, cancel := d.limited()
	defer cancel()
	text, err := d.client.Metrics(ctx)
	if err != nil {
		d.t.Fatalf("metrics: %v", err)
	}
	figures := map[string]float64{}
	for line := range strings.Lines(string(text)) {
		name, value, ok := strings.Cut(strings.TrimSpace(line), " ")
		if v, err := strconv.ParseFloat(value, 64); ok && err == nil && !strings.HasPrefix(line, "#") {
			figures[name] = v
		}
	}
	return figures
}

const soakClients = 20

func soakTime(t *testing.T) time.Duration {
	t.Helper()
	text := os.Getenv("FORKD_SOAK")
	if text == "" {
		return 30 * time.Second
	}
	limit, err := time.ParseDuration(text)
	if err != nil {
		t.Fatalf("FORKD_SOAK: %v", err)
	}
	return limit
}

// TestSoak has many clients create, use and kill at the same time. None of them sees an error but that it shall come back later, and in
// the end the daemon holds what it held before.
func TestSoak(t *testing.T) {
	t.Parallel()
	d := ownDaemon(t, setup{})
	limit := soakTime(t)
	d.fillPool(pyTag, 4)
	d.soak(5 * time.Second) // what is made once and kept is made now
	d.settle()
	before := d.metrics()
	done, later := d.soak(limit)
	d.settle()
	after := d.metrics()
	t.Logf("%d sandboxes made, used and killed in %v; %d requests were told to come back later", done, limit, later)
	if done < soakClients {
		t.Errorf("%d sandboxes in %v, want at least one of each of the %d clients", done, limit, soakClients)
	}
	for _, bound := range []struct {
		name string
		more float64
	}{{"go_goroutines", 5}, {"process_open_fds", 5}, {"process_resident_memory_bytes", 48 << 20}, {"forkd_memory_reserved_bytes", 0}, {"forkd_resident_images", 0}} {
		was, is := before[bound.name], after[bound.name]
		t.Logf("%s: %.0f, before %.0f", bound.name, is, was)
		if is > was+bound.more || was == 0 && bound.name != "forkd_memory_reserved_bytes" {
			t.Errorf("%s: %.0f after the soak, %.0f before", bound.name, is, was)
		}
	}
	for _, name := range []string{`forkd_sandboxes_ended_total{reason="lost"}`, `forkd_sandboxes{state="running"}`, `forkd_sandboxes{state="starting"}`,
		`forkd_launches{state="active"}`, `forkd_launches{state="queued"}`} {
		if v, ok := after[name]; v != 0 || !ok {
			t.Errorf("%s: %v (known: %v), want 0", name, v, ok)
		}
	}
}

// settle waits until nothing goes on any more, connections included.
func (d *daemon) settle() {
	d.t.Helper()
	d.awaitPool(pyTag, 4)
	d.checkTidy()
	d.client.Close()
	last := -1.0
	eventually(d.t, tidyLimit, func() error {
		now := d.metrics()["go_goroutines"]
		was := last
		last = now
		if now != was {
			return fmt.Errorf("%.0f goroutines, %.0f a moment ago", now, was)
		}
		return nil
	})
}

// soak runs the clients for that long. It returns how many sandboxes they had, and how often they were told to come back later.
func (d *daemon) soak(limit time.Duration) (done, later int64) {
	d.t.Helper()
	end := time.Now().Add(limit)
	var wg sync.WaitGroup
	var made, refused atomic.Int64
	for i := range soakClients {
		wg.Go(func() {
			c, err := client.New(client.Config{URL: d.socket(), Token: "none"})
			if err != nil {
				d.t.Error(err)
				return
			}
			defer c.Close()
			dice := rand.New(rand.NewPCG(uint64(i), 1))
			for time.Now().Before(end) && !d.t.Failed() {
				n, wait, err := soakOnce(d.t.Context(), c, dice)
				made.Add(int64(n))
				if err != nil {
					d.t.Errorf("client %d: %v", i, err)
				}
				if wait > 0 {
					refused.Add(1)
					time.Sleep(wait)
				}
			}
		})
	}
	wg.Wait()
	return made.Load(), refused.Load()
}

// soakOnce forks one or a few, uses each, and kills it. It returns how many there were, and how long to wait when there was no room.
func soakOnce(ctx context.Context, c *client.Client, dice *rand.Rand) (n int, wait time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	req := client.ForkRequest{SnapshotTag: pyTag, N: client.Int(1), TimeoutSecs: callLimit.Seconds()}
	switch dice.IntN(4) {
	case 0:
		req.N = client.Int(2)
	case 1:
		req.Path = api.ForkRequestPathCold
	case 2:
		req.Path = api.ForkRequestPathPool
	}
	boxes, err := c.Fork(ctx, req)
	if wait = comeBack(err); wait > 0 {
		err = nil
	}
	for _, b := range boxes {
		err = errors.Join(err, soakUse(ctx, c, b.ID, dice), c.Kill(ctx, b.ID))
	}
	return len(boxes), wait, err
}

// comeBack is how long to wait before trying again; 0 when the error says something else than that there is no room.
func comeBack(err error) time.Duration {
	var answer *client.Error
	var partial *client.PartialError
	switch {
	case errors.As(err, &answer) && answer.Status == 503:
		return answer.RetryAfter
	case errors.As(err, &partial):
		wait := 0
		for _, f := range partial.Failures {
			if f.RetryAfterSecs == 0 {
				return 0
			}
			wait = max(wait, f.RetryAfterSecs)
		}
		return time.Duration(wait) * time.Second
	}
	return 0
}

func soakUse(ctx context.Context, c *client.Client, id string, dice *rand.Rand) error {
	x := dice.IntN(1000)
	switch dice.IntN(3) {
	case 0:
		res, err := c.Eval(ctx, id, client.EvalRequest{Code: fmt.Sprintf("%d + 1", x), Timeout: guestLimit})
		if err == nil && (res.Result == nil || *res.Result != fmt.Sprint(x+1)) {
			err = fmt.Errorf("eval of %d + 1 in %s: %+v", x, id, res)
		}
		return err
	case 1:
		res, err := c.Exec(ctx, id, client.ExecRequest{Args: []string{"echo", fmt.Sprint(x)}, Timeout: guestLimit})
		if err == nil && string(res.Stdout) != fmt.Sprintf("%d\n", x) {
			err = fmt.Errorf("echo %d in %s: %+v", x, id, res)
		}
		return err
	default:
		_, err := c.Ping(ctx, id)
		return err
	}
}
