package server

import (
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/forkd/forkd/internal/sandbox"
)

var metricName = regexp.MustCompile(`\bforkd_[a-z_]+\b`)

// ownMetrics are the names of all metrics that are ours.
func ownMetrics(f *fixture) []string {
	m := f.server.metrics
	out := make(chan *prometheus.Desc, 1000)
	all := append([]prometheus.Collector{m.requests, m.duration, m.errors, m.unkept, &statsCollector{stats: f.Stats}}, f.server.Timings.collectors()...)
	for _, c := range all {
		c.Describe(out)
	}
	close(out)
	var names []string
	for d := range out {
		names = append(names, regexp.MustCompile(`fqName: "([^"]+)"`).FindStringSubmatch(d.String())[1])
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// Every metric is documented, what is documented is there, and the dashboard asks for nothing else.
func TestMetricsAreDocumented(t *testing.T) {
	t.Parallel()
	names := ownMetrics(newFixture(t))
	doc, err := os.ReadFile("../../docs/reference/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	documented := slices.Sorted(slices.Values(metricName.FindAllString(string(doc), -1)))
	documented = slices.Compact(documented)
	if !slices.Equal(names, documented) {
		t.Errorf("metrics are\n%s\ndocumented are\n%s", strings.Join(names, "\n"), strings.Join(documented, "\n"))
	}
	board, err := os.ReadFile("../../packaging/grafana/forkd.json")
	if err != nil {
		t.Fatal(err)
	}
	if !json.Valid(board) {
		t.Error("the dashboard is no JSON")
	}
	for _, name := range metricName.FindAllString(string(board), -1) {
		if !slices.Contains(names, strings.TrimSuffix(name, "_bucket")) {
			t.Errorf("the dashboard asks for %s, which is not there", name)
		}
	}
}

// What Prometheus' conventions say of names: counters end in _total, and a metric of seconds or bytes says so.
func TestMetricNames(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	for _, name := range ownMetrics(f) {
		counter := strings.HasSuffix(name, "_total")
		kind := "gauge"
		switch {
		case counter:
			kind = "counter"
		case strings.HasSuffix(name, "_seconds"):
			kind = "histogram"
		}
		for _, line := range strings.Split(f.do(t, "GET", "/metrics", "").body, "\n") {
			if fields := strings.Fields(line); len(fields) == 4 && fields[1] == "TYPE" && fields[2] == name && fields[3] != kind {
				t.Errorf("%s is a %s, its name says %s", name, fields[3], kind)
			}
		}
	}
}

func TestTimings(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	for _, x := range []sandbox.Timing{
		{Kind: sandbox.TimeReady, Engine: "qemu", How: "claim", Took: 3 * time.Millisecond},
		{Kind: sandbox.TimeBranchPause, Engine: "qemu", How: "live", Took: time.Millisecond},
		{Kind: sandbox.TimeBranch, Engine: "qemu", How: "live", Took: time.Second},
		{Kind: sandbox.TimeSuspend, Engine: "qemu", Took: time.Second}, {Kind: sandbox.TimeResume, Took: time.Second},
		{Kind: sandbox.TimeExec, Engine: "firecracker", Took: time.Second},
	} {
		f.server.Timings.Observe(x)
	}
	got := f.do(t, "GET", "/metrics", "").body
	for _, line := range []string{
		`forkd_sandbox_ready_seconds_bucket{engine="qemu",path="claim",le="0.005"} 1`,
		`forkd_branch_pause_seconds_count{engine="qemu",mode="live"} 1`, `forkd_branch_duration_seconds_count{engine="qemu",mode="live"} 1`,
		`forkd_suspend_duration_seconds_count{engine="qemu"} 1`, `forkd_resume_duration_seconds_count{engine="unknown"} 1`,
		`forkd_guest_call_duration_seconds_count{engine="firecracker",kind="exec"} 1`,
	} {
		if !strings.Contains(got, line+"\n") {
			t.Errorf("metrics lack %s", line)
		}
	}
}
