package server

import (
	"cmp"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/forkd/forkd/internal/sandbox"
)

// Timings are histograms of what the domain does. They are made before both: the domain fills them, the server shows them.
type Timings struct {
	ready, pause, branch, suspend, resume, guest *prometheus.HistogramVec
}

// Buckets of pauses: from a live branch on a quiet host to a full copy of a large machine.
var pauseBuckets = []float64{.0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5}

// NewTimings returns empty histograms.
func NewTimings() *Timings {
	histogram := func(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
		return prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "forkd_" + name, Help: help, Buckets: buckets}, labels)
	}
	return &Timings{
		ready: histogram("sandbox_ready_seconds", "From a fork's turn to the child's acknowledged identity, by engine and path: cold, or claim from a pool.",
			latencyBuckets, "engine", "path"),
		pause:   histogram("branch_pause_seconds", "How long branched sandboxes stood still, by engine and mode.", pauseBuckets, "engine", "mode"),
		branch:  histogram("branch_duration_seconds", "From a request to branch to the snapshot on disk, by engine and mode.", latencyBuckets, "engine", "mode"),
		suspend: histogram("suspend_duration_seconds", "From a request to suspend to the sandbox on disk, by engine.", latencyBuckets, "engine"),
		resume:  histogram("resume_duration_seconds", "From a resumption to the acknowledged identity, by engine.", latencyBuckets, "engine"),
		guest:   histogram("guest_call_duration_seconds", "Commands (exec) and evaluations (eval) in guests, with what they did, by engine.", latencyBuckets, "engine", "kind"),
	}
}

// Observe implements what sandbox.Config.Timings wants.
func (t *Timings) Observe(x sandbox.Timing) {
	engine := cmp.Or(x.Engine, "unknown")
	secs := x.Took.Seconds()
	switch x.Kind {
	case sandbox.TimeReady:
		t.ready.WithLabelValues(engine, x.How).Observe(secs)
	case sandbox.TimeBranchPause:
		t.pause.WithLabelValues(engine, x.How).Observe(secs)
	case sandbox.TimeBranch:
		t.branch.WithLabelValues(engine, x.How).Observe(secs)
	case sandbox.TimeSuspend:
		t.suspend.WithLabelValues(engine).Observe(secs)
	case sandbox.TimeResume:
		t.resume.WithLabelValues(engine).Observe(secs)
	case sandbox.TimeExec, sandbox.TimeEval:
		t.guest.WithLabelValues(engine, string(x.Kind)).Observe(secs)
	}
}

func (t *Timings) collectors() []prometheus.Collector {
	return []prometheus.Collector{t.ready, t.pause, t.branch, t.suspend, t.resume, t.guest}
}
