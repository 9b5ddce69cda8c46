// Package demo runs the main job from beginning to end on a daemon of its own: build an image, warm a parent, freeze it, fork children
// cold and from a pool, ask each what must be its own, and look for leftovers. It uses the program and its API as a user would.
package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/forkd/forkd/client"
	"github.com/forkd/forkd/internal/bench"
)

// Options say how the demo runs.
type Options struct {
	N        int      // children of each kind
	Program  string   // the forkd binary that is the daemon
	Cache    string   // where the image is kept from one run to the next; the demo has a directory of its own in it
	Serve    []string // further arguments of `forkd serve`
	Progress func(format string, args ...any)
}

// Report is the outcome, as `forkd demo --json` prints it.
type Report struct {
	Engine        string    `json:"engine"`
	EngineVersion string    `json:"engine_version"`
	Accel         string    `json:"accel"`
	N             int       `json:"n"`
	BootWarmMS    float64   `json:"boot_warm_ms"` // the parent: boot, readiness, warm-up
	Cold          Latency   `json:"cold"`
	Claim         Latency   `json:"claim"`
	ColdRatio     float64   `json:"cold_ratio"`  // boot_warm_ms / cold.p50_ms
	ClaimRatio    float64   `json:"claim_ratio"` // boot_warm_ms / claim.p50_ms
	AnonKiBP50    int64     `json:"anon_kib_p50"`
	PSSKiBP50     int64     `json:"pss_kib_p50"`
	Distinct      Distinct  `json:"distinct"`      // number of distinct values among the n claimed children
	DistinctCold  Distinct  `json:"distinct_cold"` // the same among the n cold ones
	DistinctAll   Distinct  `json:"distinct_all"`  // the same among all 2n
	ClockSkewMax  float64   `json:"clock_skew_ms_max"`
	Leftovers     Leftovers `json:"leftovers_detail"`
	LeftoverCount int       `json:"leftovers"`
	Example       string    `json:"example"` // what one child answered
}

// Latency is from a request to the answer of the child's first eval, one child after another.
type Latency struct {
	N      int      `json:"n"`
	Failed int      `json:"failed"`
	P50MS  float64  `json:"p50_ms"`
	P99MS  float64  `json:"p99_ms"`
	Errors []string `json:"errors,omitempty"`
}

// Distinct counts distinct values of what must be a child's own.
type Distinct struct {
	URandom      int `json:"urandom"`
	UUID4        int `json:"uuid4"`
	OpenSSL      int `json:"openssl"`
	PythonRandom int `json:"python_random"`
	NumpyRandom  int `json:"numpy_random"`
	Hostname     int `json:"hostname"`
	MachineID    int `json:"machine_id"`
}

const (
	imageName = "python"
	// warmUp imports what the children will use, so that no child imports it again.
	warmUp = "import json, os, random, socket, ssl, time, uuid\nimport numpy\nnumpy.random.rand(4).sum()"
)

// probe asks a child for everything that it must not share with a sibling, and for its clock.
const probe = `json.dumps({"urandom": os.urandom(16).hex(), "uuid4": str(uuid.uuid4()), "openssl": ssl.RAND_bytes(16).hex(),
 "python_random": random.random().hex(), "numpy_random": float(numpy.random.rand()).hex(), "hostname": socket.gethostname(),
 "machine_id": open("/etc/machine-id").read().strip(), "time": time.time()})`

// answer is what probe returns.
type answer struct {
	URandom      string  `json:"urandom"`
	UUID4        string  `json:"uuid4"`
	OpenSSL      string  `json:"openssl"`
	PythonRandom string  `json:"python_random"`
	NumpyRandom  string  `json:"numpy_random"`
	Hostname     string  `json:"hostname"`
	MachineID    string  `json:"machine_id"`
	Time         float64 `json:"time"`
}

// Run runs the demo. The report is useful also when the error is not nil.
func Run(ctx context.Context, opt Options) (r Report, err error) {
	if opt.Progress == nil {
		opt.Progress = func(string, ...any) {}
	}
	d, err := startDaemon(ctx, opt)
	if err != nil {
		return Report{N: opt.N}, err
	}
	r, err = play(ctx, d.client, opt)
	opt.Progress("shutting the daemon down and looking for leftovers")
	stopErr := d.stop()
	r.Leftovers = d.leftovers()
	r.LeftoverCount = r.Leftovers.count()
	return r, errors.Join(err, stopErr, d.remove())
}

// play is the demo on a running daemon.
func play(ctx context.Context, c *client.Client, opt Options) (r Report, err error) {
	r.N = opt.N
	opt.Progress("image %s: python3 and numpy on Debian", imageName)
	if _, err := c.BuildImage(ctx, client.ImageBuildRequest{Name: imageName, Packages: []string{"python3", "python3-numpy"}}, steps(opt)); err != nil {
		return r, fmt.Errorf("build image: %w", err)
	}
	tag := fmt.Sprintf("demo-%d", time.Now().UnixNano())
	opt.Progress("parent: boot, then import numpy, ssl and more; then freeze it as %s", tag)
	snap, err := c.CreateSnapshot(ctx, client.SnapshotRequest{Tag: tag, Image: imageName, MemMiB: 256,
		WarmUp: []client.WarmUp{{Kind: "eval", Code: warmUp}}}, steps(opt))
	if err != nil {
		return r, fmt.Errorf("snapshot: %w", err)
	}
	r.Engine, r.EngineVersion, r.Accel, r.BootWarmMS = snap.Engine, snap.EngineVersion, snap.Accel, round(snap.BootWarmMS)
	defer func() { err = errors.Join(err, clean(context.WithoutCancel(ctx), c, tag)) }()

	opt.Progress("cold: %d children, one after another, each asked 6 * 7", opt.N)
	cold, coldAnswers, skew, err := forkAndAsk(ctx, c, tag, "cold", opt.N, &r.Cold)
	if err != nil {
		return r, err
	}
	opt.Progress("memory: %d children that were not asked anything yet", opt.N)
	mem, err := bench.MeasureMemory(ctx, c, tag, opt.N)
	if err != nil {
		return r, fmt.Errorf("measure memory: %w", err)
	}
	r.AnonKiBP50, r.PSSKiBP50 = mem.AnonKiBP50, mem.PSSKiBP50
	if err := bench.KillAll(ctx, c, cold); err != nil {
		return r, err
	}
	opt.Progress("pool: %d children made ready ahead", opt.N)
	if err := bench.FillPool(ctx, c, tag, opt.N); err != nil {
		return r, err
	}
	opt.Progress("claim: %d children, one after another, each asked 6 * 7", opt.N)
	_, claimAnswers, claimSkew, err := forkAndAsk(ctx, c, tag, "pool", opt.N, &r.Claim)
	if err != nil {
		return r, err
	}
	r.Distinct, r.DistinctCold = distinct(claimAnswers), distinct(coldAnswers)
	r.DistinctAll = distinct(slices.Concat(coldAnswers, claimAnswers))
	r.ClockSkewMax = round(max(skew, claimSkew))
	r.ColdRatio, r.ClaimRatio = ratio(r.BootWarmMS, r.Cold.P50MS), ratio(r.BootWarmMS, r.Claim.P50MS)
	if len(claimAnswers) > 0 {
		a := claimAnswers[0]
		r.Example = fmt.Sprintf("%s: random() = %s, uuid4() = %s", a.Hostname, a.PythonRandom, a.UUID4)
	}
	return r, nil
}

// forkAndAsk makes n children one after another and times each, then asks them all what is their own. skew is the largest difference
// between a guest's clock and the host's in milliseconds.
func forkAndAsk(ctx context.Context, c *client.Client, tag, path string, n int, l *Latency) (children []bench.Child, answers []answer, skew float64, err error) {
	start := time.Now()
	for range n {
		children = append(children, bench.MeasureOne(ctx, c, tag, path, bench.AnswerEval))
	}
	run := bench.Summarise(children, start)
	*l = Latency{N: run.N, Failed: run.Failed, P50MS: run.Answer.P50MS, P99MS: run.Answer.P99MS}
	for _, e := range run.Errors {
		l.Errors = append(l.Errors, e.Error)
	}
	for _, child := range children {
		if child.Err != nil {
			continue
		}
		a, off, err := ask(ctx, c, child.ID)
		if err != nil {
			return children, answers, skew, err
		}
		answers, skew = append(answers, a), max(skew, off)
	}
	return children, answers, skew, ctx.Err()
}

// ask runs the probe. The clock's error is taken against the nearer end of the request, since the guest looked in between.
func ask(ctx context.Context, c *client.Client, id string) (a answer, skewMS float64, err error) {
	before := time.Now()
	res, err := c.Eval(ctx, id, client.EvalRequest{Code: probe})
	after := time.Now()
	if err != nil {
		return a, 0, err
	}
	if res.Error != nil || res.Result == nil {
		return a, 0, fmt.Errorf("probe in %s: %+v", id, res)
	}
	text := *res.Result // the repr of a str: quoted by Python
	if err := json.Unmarshal([]byte(text[1:len(text)-1]), &a); err != nil {
		return a, 0, fmt.Errorf("probe in %s answered %s: %w", id, text, err)
	}
	guest := time.Unix(0, int64(a.Time*1e9))
	switch {
	case guest.Before(before):
		skewMS = before.Sub(guest).Seconds() * 1e3
	case guest.After(after):
		skewMS = guest.Sub(after).Seconds() * 1e3
	}
	return a, skewMS, nil
}

func distinct(answers []answer) Distinct {
	count := func(get func(answer) string) int {
		seen := map[string]bool{}
		for _, a := range answers {
			seen[get(a)] = true
		}
		return len(seen)
	}
	return Distinct{
		URandom:      count(func(a answer) string { return a.URandom }),
		UUID4:        count(func(a answer) string { return a.UUID4 }),
		OpenSSL:      count(func(a answer) string { return a.OpenSSL }),
		PythonRandom: count(func(a answer) string { return a.PythonRandom }),
		NumpyRandom:  count(func(a answer) string { return a.NumpyRandom }),
		Hostname:     count(func(a answer) string { return a.Hostname }),
		MachineID:    count(func(a answer) string { return a.MachineID }),
	}
}

// clean kills the demo's sandboxes and deletes its snapshot.
func clean(ctx context.Context, c *client.Client, tag string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	list, err := c.Sandboxes(ctx, false)
	if err != nil {
		return fmt.Errorf("clean up: %w", err)
	}
	children := make([]bench.Child, len(list))
	for i, s := range list {
		children[i].ID = s.ID
	}
	if err := bench.KillAll(ctx, c, children); err != nil {
		return fmt.Errorf("clean up: %w", err)
	}
	return c.DeleteSnapshot(ctx, tag, client.DeleteUnused)
}

// steps shows the daemon's progress, each step once.
func steps(opt Options) func(client.Progress) {
	last := ""
	return func(p client.Progress) {
		if p.Step != "" && p.Step != last {
			last = p.Step
			detail, more, _ := strings.Cut(p.Detail, "\n")
			if more != "" {
				detail += " …"
			}
			opt.Progress("  %s %s", p.Step, detail)
		}
	}
}

func round(v float64) float64 { return math.Round(v*100) / 100 }

func ratio(a, b float64) float64 {
	if b == 0 {
		return 0
	}
	return round(a / b)
}
