package server

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/internal/limits"
	"github.com/forkd/forkd/internal/sandbox"
)

// TestBranch holds what published and new clients ask for reaches the domain, and how they are answered.
func TestBranch(t *testing.T) {
	t.Parallel()
	wait := sandbox.BranchRequest{Wait: true}
	with := func(change func(*sandbox.BranchRequest)) sandbox.BranchRequest {
		r := wait
		change(&r)
		return r
	}
	tests := []struct {
		name, body string
		want       sandbox.BranchRequest
		status     int
	}{
		{"no body", "", wait, 201},
		{"as published clients do", "{}", wait, 201},
		{"tag", `{"tag": "b"}`, with(func(r *sandbox.BranchRequest) { r.Tag = "b" }), 201},
		{"live", `{"mode": "live"}`, with(func(r *sandbox.BranchRequest) { r.Mode = sandbox.BranchLive }), 201},
		{"diff", `{"mode": "diff"}`, with(func(r *sandbox.BranchRequest) { r.Mode = sandbox.BranchDiff }), 201},
		{"full", `{"mode": "full"}`, with(func(r *sandbox.BranchRequest) { r.Mode = sandbox.BranchFull }), 201},
		{"the old diff", `{"diff": true}`, with(func(r *sandbox.BranchRequest) { r.Mode = sandbox.BranchDiff }), 201},
		{"the old live", `{"live": true}`, with(func(r *sandbox.BranchRequest) { r.Mode = sandbox.BranchLive }), 201},
		{"with the parent it has", `{"mode": "diff", "parent_tag": "py"}`, with(func(r *sandbox.BranchRequest) { r.Mode = sandbox.BranchDiff }), 201},
		{"measured", `{"measure_diff": true}`, with(func(r *sandbox.BranchRequest) { r.MeasureDiff = true }), 201},
		{"not waited for", `{"wait": false}`, sandbox.BranchRequest{}, 202},
		{"waited for", `{"wait": true}`, wait, 201},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			got := f.do(t, "POST", "/v1/sandboxes/sb1/branch", tt.body)
			if got.status != tt.status {
				t.Errorf("= %d %s, want %d", got.status, got.body, tt.status)
			}
			if diff := cmp.Diff([]sandbox.BranchRequest{tt.want}, f.branches); diff != "" {
				t.Errorf("branches (-want +got):\n%s", diff)
			}
			var info api.SnapshotInfo
			if err := json.Unmarshal([]byte(got.body), &info); err != nil {
				t.Fatal(err)
			}
			if info.BranchedFrom != "sb0" || info.PauseMS != 1.5 || info.DiffMS != 30 || info.DiffPhysicalBytes != 4096 || info.DiffLogicalBytes != 8192 || info.ParentTag != "py" {
				t.Errorf("answer = %+v", info)
			}
			if want := api.SnapshotInfoStatusReady; tt.status == 202 {
				want = api.SnapshotInfoStatusWriting
				if info.Status != want {
					t.Errorf("status = %s, want %s", info.Status, want)
				}
			}
		})
	}
}

// TestBranchIsRepeatable holds that a branch whose answer got lost is not made twice.
func TestBranchIsRepeatable(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	for range 2 {
		if got := f.do(t, "POST", "/v1/sandboxes/sb1/branch", "", "Idempotency-Key", "k"); got.status != 201 {
			t.Errorf("= %d %s", got.status, got.body)
		}
	}
	if len(f.branches) != 1 {
		t.Errorf("%d branches, want 1", len(f.branches))
	}
}

func TestForkRunning(t *testing.T) {
	t.Parallel()
	failed := sandbox.ForkResult{Err: &sandbox.Error{Code: sandbox.CodeInsufficientMemory, Message: "no memory"}}
	ready := stubSandbox(0)
	tests := []struct {
		name, body string
		results    []sandbox.ForkResult // nil: all are ready
		status     int
		says       string
		header     string // Forkd-Failed
	}{
		{"one", "", nil, 201, `[{"branch_count":0`, ""},
		{"some", `{"n": 3}`, nil, 201, `[{"branch_count":0`, ""},
		{"with a report", `{"n": 2, "report": true}`, nil, 201, `"pause_ms":1.5`, ""},
		{"kept", `{"tag": "b", "report": true}`, nil, 201, `"tag":"b"`, ""},
		{"one of two", `{"n": 2}`, []sandbox.ForkResult{{Sandbox: &ready}, failed}, 201, `[{"branch_count":0`, "1"},
		{"one of two, reported", `{"n": 2, "report": true}`, []sandbox.ForkResult{{Sandbox: &ready}, failed}, 207, `"errors":[{"code":"insufficient_memory"`, "1"},
		{"none", `{"n": 1, "report": true}`, []sandbox.ForkResult{failed}, 503, "no memory", ""},
		{"none, but the instant is kept", `{"tag": "b", "report": true}`, []sandbox.ForkResult{failed}, 207, `"sandboxes":[]`, "1"},
		{"none, kept without a report", `{"tag": "b"}`, []sandbox.ForkResult{failed}, 503, "no memory", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			if tt.results != nil {
				f.forkRunning = func(r sandbox.ForkRunningRequest) (sandbox.ForkRunningResult, error) {
					return sandbox.ForkRunningResult{Results: tt.results, Pause: 1500 * time.Microsecond, SnapshotID: "sn9", Tag: r.Tag}, nil
				}
			}
			got := f.do(t, "POST", "/v1/sandboxes/sb1/fork", tt.body)
			if got.status != tt.status || !strings.Contains(got.body, tt.says) || got.header.Get("Forkd-Failed") != tt.header {
				t.Errorf("= %d %s (Forkd-Failed %q), want %d with %s (%q)", got.status, got.body, got.header.Get("Forkd-Failed"), tt.status, tt.says, tt.header)
			}
			if pause := got.header.Get("Forkd-Pause-Ms"); tt.status < 300 && pause != "1.5" {
				t.Errorf("Forkd-Pause-Ms = %q, want 1.5", pause)
			}
		})
	}
	f := newFixture(t)
	f.do(t, "POST", "/v1/sandboxes/sb1/fork", `{"n": 5, "tag": "b", "env": {"A": "1"}, "metadata": {"k": "v"}, "timeout_secs": 60, "memory_limit_mib": 99}`)
	want := []sandbox.ForkRunningRequest{{N: 5, Tag: "b", Env: map[string]string{"A": "1"}, Metadata: map[string]string{"k": "v"}, Timeout: time.Minute, Limits: limits.Limits{MemoryMiB: 99}}}
	if diff := cmp.Diff(want, f.runningForks); diff != "" {
		t.Errorf("fork (-want +got):\n%s", diff)
	}
}

func TestSuspendAndResume(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	got := f.do(t, "POST", "/v1/sandboxes/sb0/suspend", "")
	var sb api.SandboxInfo
	if err := json.Unmarshal([]byte(got.body), &sb); err != nil || got.status != 200 {
		t.Fatalf("= %d %s", got.status, got.body)
	}
	if sb.State != "suspended" || sb.Name != "w" || sb.AutoSuspendSecs != 90 || !sb.AutoResume || sb.SuspendedAtUnix != stubTime.Unix()+3600 {
		t.Errorf("answer = %+v", sb)
	}
	if got := f.do(t, "POST", "/v1/sandboxes/sb0/resume", ""); got.status != 200 || !strings.Contains(got.body, `"state":"running"`) {
		t.Errorf("= %d %s", got.status, got.body)
	}
	if diff := cmp.Diff([]string{"suspend sb0", "resume sb0"}, f.moved); diff != "" {
		t.Errorf("moves (-want +got):\n%s", diff)
	}
}

func TestDiffAndCompact(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	body := `{"tag": "b", "steps": [{"kind": "exec", "code": "pip install x"}, {"kind": "eval", "code": "import x"}], "timeout_secs": 9, "env": {"A": "1"}}`
	if got := f.do(t, "POST", "/v1/snapshots/py/diff", body); got.status != 201 || !strings.Contains(got.body, `"tag":"b1"`) {
		t.Errorf("= %d %s", got.status, got.body)
	}
	got := f.do(t, "POST", "/v1/snapshots/py/diff", body, "Accept", ndjson)
	if lines := strings.Split(strings.TrimSpace(got.body), "\n"); got.status != 200 || len(lines) != 2 || !strings.Contains(lines[0], "pip install") || !strings.Contains(lines[1], `"event":"done"`) {
		t.Errorf("stream = %d %s", got.status, got.body)
	}
	want := sandbox.DiffRequest{From: "py", Tag: "b", Timeout: 9 * time.Second, Env: map[string]string{"A": "1"},
		Steps: []sandbox.WarmUp{{Kind: sandbox.WarmUpExec, Code: "pip install x"}, {Kind: sandbox.WarmUpEval, Code: "import x"}}}
	if diff := cmp.Diff([]sandbox.DiffRequest{want, want}, f.diffs); diff != "" {
		t.Errorf("diffs (-want +got):\n%s", diff)
	}
	if got := f.do(t, "POST", "/v1/snapshots/py/compact", `{"to": "flat"}`); got.status != 201 || !strings.Contains(got.body, `"tag":"flat"`) {
		t.Errorf("= %d %s", got.status, got.body)
	}
	if diff := cmp.Diff([]string{"py flat"}, f.compacted); diff != "" {
		t.Errorf("compacted (-want +got):\n%s", diff)
	}
}

func TestTree(t *testing.T) {
	t.Parallel()
	got := newFixture(t).do(t, "GET", "/v1/tree", "")
	var tree []api.TreeNode
	if err := json.Unmarshal([]byte(got.body), &tree); err != nil || got.status != 200 {
		t.Fatalf("= %d %s", got.status, got.body)
	}
	if len(tree) != 1 || tree[0].Snapshot.Tag != "py" || len(tree[0].Sandboxes) != 1 || len(tree[0].Children) != 1 || tree[0].Children[0].Snapshot.Tag != "b1" {
		t.Errorf("tree = %s", got.body)
	}
	if !strings.Contains(got.body, `"sandboxes":[]`) || strings.Contains(got.body, "null") && !strings.Contains(got.body, `"children":[]`) {
		t.Errorf("empty lists are not []: %s", got.body)
	}
}

// TestNamesLikeVerbs holds that what is called like a route can still be reached.
func TestNamesLikeVerbs(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	for _, path := range []string{"/v1/snapshots/unpack", "/v1/images/prune"} {
		if got := f.do(t, "DELETE", path, ""); got.status != 204 {
			t.Errorf("DELETE %s = %d %s", path, got.status, got.body)
		}
		if got := f.do(t, "PUT", path, ""); got.status != 405 || !strings.Contains(got.header.Get("Allow"), "DELETE") {
			t.Errorf("PUT %s = %d %s, Allow %s", path, got.status, got.body, got.header.Get("Allow"))
		}
	}
}
