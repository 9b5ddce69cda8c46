package server

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/internal/limits"
	"github.com/forkd/forkd/internal/sandbox"
)

// TestWorkspaceStates holds the published words for a sandbox's states.
func TestWorkspaceStates(t *testing.T) {
	t.Parallel()
	sb := func(change func(*sandbox.Sandbox)) sandbox.Sandbox {
		s := stubSandbox(0)
		s.Name = "w"
		change(&s)
		return s
	}
	made := stubTime.Unix()
	tests := []struct {
		name string
		in   sandbox.Sandbox
		want api.WorkspaceInfo
	}{
		{"running", sb(func(*sandbox.Sandbox) {}), api.WorkspaceInfo{Status: "running", LiveSandboxID: "sb0", LastActiveUnix: made}},
		{"starting", sb(func(s *sandbox.Sandbox) { s.State = sandbox.StateStarting }), api.WorkspaceInfo{Status: "running", LiveSandboxID: "sb0", LastActiveUnix: made}},
		{"suspended", suspended(), api.WorkspaceInfo{Status: "suspended", LastActiveUnix: made + 3600}},
		{"ended", sb(func(s *sandbox.Sandbox) {
			s.State, s.EndedAt, s.Reason = sandbox.StateFailed, stubTime.Add(time.Minute), "out of memory"
		}), api.WorkspaceInfo{Status: "stale", LastActiveUnix: made + 60, Reason: "out of memory"}},
	}
	for _, tt := range tests {
		tt.want.ID, tt.want.Name, tt.want.SourceSnapshotTag, tt.want.CreatedAtUnix = "sb0", "w", "py", made
		if diff := cmp.Diff(tt.want, workspaceInfo(tt.in)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
}

func TestWorkspaces(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	old := suspended()
	old.ID, old.State, old.Name = "old1", sandbox.StateFailed, "gone"
	older := old
	older.ID = "old2"
	f.ended = []sandbox.Sandbox{old, older}
	var list []api.WorkspaceInfo
	if err := json.Unmarshal([]byte(f.do(t, "GET", "/v1/workspaces", "").body), &list); err != nil {
		t.Fatal(err)
	}
	if len(list) != 1 || list[0].ID != "old1" || list[0].Status != "stale" {
		t.Errorf("list = %+v, want the last of those that are called gone, and none without a name", list)
	}

	got := f.do(t, "POST", "/v1/workspaces", `{"name": "w", "snapshot_tag": "py", "memory_limit_mib": 256, "auto_suspend_secs": 1.5, "auto_resume": true, "timeout_secs": 60}`)
	if got.status != 201 || !strings.Contains(got.body, `"live_sandbox_id":"sb0"`) {
		t.Errorf("create = %d %s", got.status, got.body)
	}
	want := []sandbox.ForkRequest{{Tag: "py", N: 1, Name: "w", Limits: limits.Limits{MemoryMiB: 256}, Timeout: time.Minute, AutoSuspend: 1500 * time.Millisecond, AutoResume: true}}
	if diff := cmp.Diff(want, f.forks); diff != "" {
		t.Errorf("fork (-want +got):\n%s", diff)
	}
	for _, move := range []string{"suspend", "resume"} {
		if got := f.do(t, "POST", "/v1/workspaces/w/"+move, ""); got.status != 200 {
			t.Errorf("%s = %d %s", move, got.status, got.body)
		}
	}
	if diff := cmp.Diff([]string{"suspend sb0", "resume sb0"}, f.moved); diff != "" {
		t.Errorf("moves (-want +got):\n%s", diff)
	}

	// What had the name before goes with it.
	f.ended[1].Name = "w"
	if got := f.do(t, "DELETE", "/v1/workspaces/w", ""); got.status != 204 {
		t.Errorf("delete = %d %s", got.status, got.body)
	}
	if !slices.Equal(f.killed, []string{"sb0", "old2"}) {
		t.Errorf("killed %v, want sb0 and old2", f.killed)
	}
}
