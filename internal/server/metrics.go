package server

import (
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/forkd/forkd/internal/sandbox"
)

// Buckets from a claim on a quiet host (a few milliseconds) to a cold fork of many on a small one.
var latencyBuckets = []float64{.002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 30}

// metrics are what GET /metrics shows. The registry is the server's own, so that tests and two servers don't share figures.
type metrics struct {
	handler  http.Handler
	requests *prometheus.CounterVec
	duration *prometheus.HistogramVec
	errors   *prometheus.CounterVec
	unkept   prometheus.Counter
}

func newMetrics(stats func() sandbox.Stats, timings *Timings) *metrics {
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "forkd_http_requests_total",
			Help: "Requests by route, method and status."}, []string{"route", "method", "code"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "forkd_http_request_duration_seconds",
			Help: "From the first byte of a request to the last of its answer.", Buckets: latencyBuckets}, []string{"route", "method"}),
		errors: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "forkd_errors_total",
			Help: "Requests that failed, by the code of the error; client_gone when nobody waited for the answer."}, []string{"code"}),
	}
	m.unkept = prometheus.NewCounter(prometheus.CounterOpts{Name: "forkd_audit_failures_total", Help: "Requests that could not be written to the audit record."})
	registry := prometheus.NewRegistry()
	registry.MustRegister(timings.collectors()...)
	registry.MustRegister(m.requests, m.duration, m.errors, m.unkept, &statsCollector{stats: stats},
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	m.handler = promhttp.HandlerFor(registry, promhttp.HandlerOpts{})
	return m
}

func (m *metrics) serve(w http.ResponseWriter, r *http.Request) error {
	m.handler.ServeHTTP(w, r)
	return nil
}

func (m *metrics) request(route, method string, status int, took time.Duration) {
	method = knownMethod(method)
	m.requests.WithLabelValues(route, method, strconv.Itoa(status)).Inc()
	m.duration.WithLabelValues(route, method).Observe(took.Seconds())
}

// knownMethod bounds the label's values: a method is any word a client likes.
func knownMethod(method string) string {
	switch method {
	case http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodDelete:
		return method
	}
	return "other"
}

// failed counts an error by its code, of which there are as many as this program has.
func (m *metrics) failed(err error, status int) {
	if status == statusClientGone {
		m.errors.WithLabelValues("client_gone").Inc()
		return
	}
	m.errors.WithLabelValues(describe(err).Code).Inc()
}

// statsCollector asks the domain for its figures when somebody looks at the metrics.
type statsCollector struct{ stats func() sandbox.Stats }

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("forkd_"+name, help, labels, nil)
}

var (
	descSandboxes = desc("sandboxes", "Sandboxes by state.", "state")
	descBranches  = desc("branches", "Running sandboxes that are being frozen, and requests that wait for their turn to be.", "state")
	descPool      = desc("pool_children", "Children of pools: ready to be claimed, or being made.", "state")
	descSnapshots = desc("snapshots", "Snapshots.")
	descLaunches  = desc("launches", "Launch slots in use, and launches that wait for one.", "state")
	descBudget    = desc("memory_budget_bytes", "Memory that may be handed out in all.")
	descReserved  = desc("memory_reserved_bytes", "Memory handed out to machines.")
	descResident  = desc("resident_images", "Snapshots whose memory is loaded.")
	descResBytes  = desc("resident_bytes", "Memory of the resident images.")
	descAnonymous = desc("sandbox_anonymous_bytes", "Memory that is the sandboxes' own, their monitors' included; at most 15 seconds old.")
	descDenied    = desc("denied_connections_total", "Connections that guests tried and their network policies did not let through; at most 15 seconds old.")
	descOOM       = desc("oom_kills_total", "Kills for want of memory: of monitors, because of their limit (cgroup) or because the host had none left (host), and of programs by their guest's kernel (guest).", "where")
	descDiskFull  = desc("guest_disk_full_total", "How often the disk of a guest became full.")
	descForks     = desc("forks_total", "Children by how they came to be: cold, claim, or failed.", "result")
	descEnded     = desc("sandboxes_ended_total", "Sandboxes that ended: killed, expired at their deadline, their guest shut down or its kernel panicked, or lost.", "reason")
)

// Describe implements prometheus.Collector. It does not ask for figures: nobody looks yet.
func (c *statsCollector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descSandboxes, descBranches, descPool, descSnapshots, descLaunches, descBudget, descReserved,
		descResident, descResBytes, descAnonymous, descDenied, descOOM, descDiskFull, descForks, descEnded} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (c *statsCollector) Collect(out chan<- prometheus.Metric) {
	s := c.stats()
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	counter := func(d *prometheus.Desc, v uint64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	gauge(descSandboxes, float64(s.Running), "running")
	gauge(descSandboxes, float64(s.Starting), "starting")
	gauge(descSandboxes, float64(s.Suspended), "suspended")
	gauge(descBranches, float64(s.BranchesActive), "active")
	gauge(descBranches, float64(s.BranchesQueued), "queued")
	gauge(descPool, float64(s.PoolReady), "ready")
	gauge(descPool, float64(s.PoolFills), "filling")
	gauge(descSnapshots, float64(s.Snapshots))
	gauge(descLaunches, float64(s.LaunchesActive), "active")
	gauge(descLaunches, float64(s.LaunchesQueued), "queued")
	gauge(descBudget, float64(s.MemoryBudgetBytes))
	gauge(descReserved, float64(s.MemoryReservedBytes))
	gauge(descResident, float64(s.ResidentImages))
	gauge(descResBytes, float64(s.ResidentBytes))
	gauge(descAnonymous, float64(s.AnonymousBytes))
	counter(descDenied, s.DeniedAttempts)
	counter(descOOM, s.OOMCgroup, "cgroup")
	counter(descOOM, s.OOMHost, "host")
	counter(descOOM, s.OOMGuest, "guest")
	counter(descDiskFull, s.DiskFull)
	counter(descForks, s.ForksCold, "cold")
	counter(descForks, s.ForksClaim, "claim")
	counter(descForks, s.ForksFailed, "failed")
	counter(descEnded, s.Kills, "killed")
	counter(descEnded, s.Expired, "expired")
	counter(descEnded, s.Shutdowns, "shutdown")
	counter(descEnded, s.Panics, "panicked")
	counter(descEnded, s.Lost, "lost")
}
