package server

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/internal/image"
	"github.com/forkd/forkd/internal/limits"
	"github.com/forkd/forkd/internal/sandbox"
	"github.com/forkd/forkd/internal/transfer"
)

func readAnswer(t *testing.T, conn net.Conn, req *http.Request) answer {
	t.Helper()
	resp, err := http.ReadResponse(bufio.NewReader(conn), req)
	if err != nil {
		t.Fatalf("read the answer: %v", err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("read the body: %v", err)
	}
	return answer{resp.StatusCode, resp.Header, string(body)}
}

// TestErrors holds the map of codes to statuses.
func TestErrors(t *testing.T) {
	t.Parallel()
	tests := []struct {
		err    error
		status int
		code   string
		retry  string
	}{
		{&sandbox.Error{Code: sandbox.CodeInvalidArgument}, 400, "invalid_argument", ""},
		{&sandbox.Error{Code: sandbox.CodeInvalidTag}, 400, "invalid_tag", ""},
		{&sandbox.Error{Code: sandbox.CodeSnapshotNotFound}, 404, "snapshot_not_found", ""},
		{&sandbox.Error{Code: sandbox.CodeSandboxNotFound}, 404, "sandbox_not_found", ""},
		{&sandbox.Error{Code: sandbox.CodeImageNotFound}, 404, "image_not_found", ""},
		{&sandbox.Error{Code: sandbox.CodeSnapshotExists}, 409, "snapshot_exists", ""},
		{&sandbox.Error{Code: sandbox.CodeImageExists}, 409, "image_exists", ""},
		{&sandbox.Error{Code: sandbox.CodeSnapshotInUse}, 409, "snapshot_in_use", ""},
		{&sandbox.Error{Code: sandbox.CodeImageInUse}, 409, "image_in_use", ""},
		{&sandbox.Error{Code: sandbox.CodeInvalidState}, 409, "invalid_state", ""},
		{&sandbox.Error{Code: sandbox.CodeNoInterpreter}, 422, "no_interpreter", ""},
		{&sandbox.Error{Code: sandbox.CodeWarmUpFailed}, 422, "warm_up_failed", ""},
		{&sandbox.Error{Code: sandbox.CodeSnapshotCorrupt}, 422, "snapshot_corrupt", ""},
		{&sandbox.Error{Code: sandbox.CodeSnapshotIncompatible}, 422, "snapshot_incompatible", ""},
		{&sandbox.Error{Code: sandbox.CodeInsufficientMemory}, 503, "insufficient_memory", "1"},
		{&sandbox.Error{Code: sandbox.CodeQueueFull, RetryAfter: 2500 * time.Millisecond}, 503, "queue_full", "3"},
		{&sandbox.Error{Code: sandbox.CodeBranchCap}, 503, "too_many_branches", "1"},
		{&sandbox.Error{Code: sandbox.CodeSandboxExists}, 409, "sandbox_exists", ""},
		{&sandbox.Error{Code: transfer.CodeInvalidPack}, 422, "invalid_pack", ""},
		{&sandbox.Error{Code: transfer.CodeUntrustedPack}, 403, "untrusted_pack", ""},
		{&sandbox.Error{Code: sandbox.CodeShuttingDown}, 503, "shutting_down", ""},
		{&sandbox.Error{Code: sandbox.CodeEngineUnavailable}, 503, "engine_unavailable", ""},
		{&sandbox.Error{Code: sandbox.CodeDiskFull}, 507, "disk_full", ""},
		{&sandbox.Error{Code: sandbox.CodeTimeout}, 504, "timeout", ""},
		{&sandbox.Error{Code: sandbox.CodeIdentityFailed}, 500, "identity_failed", ""},
		{&sandbox.Error{Code: sandbox.CodeGuestUnreachable}, 502, "guest_unreachable", ""},
		{&sandbox.Error{Code: sandbox.CodeSandboxGone}, 410, "sandbox_gone", ""},
		{&sandbox.Error{Code: sandbox.CodeInternal}, 500, "internal", ""},
		{fmt.Errorf("image x: %w", image.ErrNotFound), 404, "image_not_found", ""},
		{fmt.Errorf("image x: %w", image.ErrInvalid), 400, "invalid_argument", ""},
		{fmt.Errorf("image x: %w", image.ErrCorrupt), 500, "internal", ""},
		{fmt.Errorf("write x: %w", syscall.ENOSPC), 507, "disk_full", ""},
		{errors.New("disk on fire"), 500, "internal", ""},
		{context.DeadlineExceeded, 504, "timeout", ""},
	}
	for _, tt := range tests {
		t.Run(tt.code, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			f.fail = tt.err
			got := f.do(t, "GET", "/v1/sandboxes/sb1", "")
			if got.status != tt.status || got.code() != tt.code || got.header.Get("Retry-After") != tt.retry {
				t.Errorf("= %d %q Retry-After %q, want %d %q %q", got.status, got.code(), got.header.Get("Retry-After"), tt.status, tt.code, tt.retry)
			}
			if documented := regexp.MustCompile(fmt.Sprintf(`\b%d [a-z_, ]*\b%s\b`, tt.status, tt.code)); !documented.Match(api.Spec) {
				t.Errorf("openapi.yaml does not list %s under %d", tt.code, tt.status)
			}
		})
	}
}

func TestForkPartly(t *testing.T) {
	t.Parallel()
	some := func(_ context.Context, r sandbox.ForkRequest) ([]sandbox.ForkResult, error) {
		var out []sandbox.ForkResult
		for i := range r.N {
			if sb := stubSandbox(i); i%2 == 0 {
				out = append(out, sandbox.ForkResult{Sandbox: &sb})
			} else {
				out = append(out, sandbox.ForkResult{Err: &sandbox.Error{Code: sandbox.CodeInsufficientMemory, Message: "no memory\nleft", Hint: "kill some", RetryAfter: time.Second}})
			}
		}
		return out, nil
	}
	t.Run("as published", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t)
		f.fork = some
		got := f.do(t, "POST", "/v1/sandboxes", `{"snapshot_tag": "py", "n": 3}`)
		var list []api.SandboxInfo
		if err := json.Unmarshal([]byte(got.body), &list); err != nil || got.status != 201 {
			t.Fatalf("= %d, %v, want 201 and an array\n%s", got.status, err, got.body)
		}
		if len(list) != 2 || got.header.Get("Forkd-Failed") != "1" || got.header.Get("Forkd-Error") != "insufficient_memory: no memory left" {
			t.Errorf("= %d sandboxes, failed %q, error %q", len(list), got.header.Get("Forkd-Failed"), got.header.Get("Forkd-Error"))
		}
	})
	t.Run("with a report", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t)
		f.fork = some
		got := f.do(t, "POST", "/v1/sandboxes", `{"snapshot_tag": "py", "n": 3, "report": true}`)
		var report api.ForkReport
		if err := json.Unmarshal([]byte(got.body), &report); err != nil || got.status != 207 {
			t.Fatalf("= %d, %v, want 207 and a report\n%s", got.status, err, got.body)
		}
		want := []api.ForkError{{Index: 1, Code: "insufficient_memory", Error: "no memory\nleft", Hint: "kill some", RetryAfterSecs: 1}}
		if diff := cmp.Diff(want, report.Errors); diff != "" || len(report.Sandboxes) != 2 {
			t.Errorf("%d sandboxes; errors (-want +got):\n%s", len(report.Sandboxes), diff)
		}
	})
	t.Run("all failed", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t)
		f.fork = func(context.Context, sandbox.ForkRequest) ([]sandbox.ForkResult, error) {
			e := &sandbox.Error{Code: sandbox.CodeIdentityFailed, Message: "no identity"}
			return []sandbox.ForkResult{{Err: e}, {Err: errors.New("other")}}, nil
		}
		for _, body := range []string{`{"snapshot_tag": "py", "n": 2}`, `{"snapshot_tag": "py", "n": 2, "report": true}`} {
			if got := f.do(t, "POST", "/v1/sandboxes", body); got.status != 500 || got.code() != "identity_failed" {
				t.Errorf("%s = %d %q, want 500 identity_failed", body, got.status, got.code())
			}
		}
	})
	t.Run("none failed, with a report", func(t *testing.T) {
		t.Parallel()
		got := newFixture(t).do(t, "POST", "/v1/sandboxes", `{"snapshot_tag": "py", "n": 2, "report": true}`)
		if got.status != 201 || !strings.Contains(got.body, `"errors":[]`) {
			t.Errorf("= %d %s, want 201 and no errors", got.status, got.body)
		}
	})
}

func TestForkRequestReachesDomain(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.do(t, "POST", "/v1/sandboxes", `{"snapshot_tag": "py", "n": 2, "env": {"A": "b"}, "metadata": {"m": "n"}, "timeout_secs": 1.5,
		"memory_limit_mib": 64, "path": "pool", "per_child_netns": true, "live_fork": true, "prewarm": true, "hugepages": true}`)
	f.do(t, "POST", "/v1/sandboxes", `{"snapshot_tag": "py", "memory_limit_mib": null}`)
	want := []sandbox.ForkRequest{
		{Tag: "py", N: 2, Env: map[string]string{"A": "b"}, Metadata: map[string]string{"m": "n"}, Timeout: 1500 * time.Millisecond,
			Limits: limits.Limits{MemoryMiB: 64}, Path: sandbox.PathPool},
		{Tag: "py", N: 1},
	}
	if diff := cmp.Diff(want, f.forks); diff != "" {
		t.Errorf("forks (-want +got):\n%s", diff)
	}
}

func TestSnapshotRequestReachesDomain(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	for _, body := range []string{
		`{"tag": "t", "image": "py", "mem_mib": 256, "vcpus": 2, "warm_up": [{"kind": "exec", "code": "true"}, {"kind": "eval", "code": "1"}],
			"probe": "true", "timeout_secs": 60, "env": {"A": "b"}, "pool_size": 3}`,
		`{"tag": "t", "kernel": "/k", "rootfs": "py", "rw": true, "tap": null, "boot_wait_secs": 10}`,
		`{"tag": "t", "kernel": "/k", "rootfs": "/data/images/../images/i1/rootfs.erofs"}`,
	} {
		if got := f.do(t, "POST", "/v1/snapshots", body); got.status != 201 {
			t.Errorf("%s = %d %s", body, got.status, got.body)
		}
	}
	want := []sandbox.SnapshotRequest{
		{Tag: "t", Image: "py", MemMiB: 256, VCPUs: 2, Probe: "true", Timeout: time.Minute, Env: map[string]string{"A": "b"}, PoolSize: 3,
			WarmUp: []sandbox.WarmUp{{Kind: "exec", Code: "true"}, {Kind: "eval", Code: "1"}}},
		{Tag: "t", Image: "py"},
		{Tag: "t", Image: "i1"},
	}
	if diff := cmp.Diff(want, f.snaps); diff != "" {
		t.Errorf("snapshots (-want +got):\n%s", diff)
	}
}

func TestExec(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	got := f.do(t, "POST", "/v1/sandboxes/sb1/exec", `{"args": ["a", "b"]}`)
	want := `{"duration_ms":1,"exit_code":3,"stderr":"err` + "\uFFFD" + `\n","stdout":"out\n","timed_out":false,"truncated":false}` + "\n"
	if got.body != want {
		t.Errorf("text = %s, want %s", got.body, want)
	}
	got = f.do(t, "POST", "/v1/sandboxes/sb1/exec", `{"args": ["a"], "encoding": "base64", "stdin": "AP8=", "timeout_secs": 0, "cwd": "/x", "user": "u", "max_output_bytes": 9}`)
	if !strings.Contains(got.body, `"stderr":"ZXJy/wo="`) {
		t.Errorf("base64 = %s", got.body)
	}
	wantReqs := []sandbox.ExecRequest{
		{Args: []string{"a", "b"}, Timeout: 30 * time.Second, Stdin: []byte{}},
		{Args: []string{"a"}, Timeout: maxExecTimeout, Stdin: []byte{0, 255}, Cwd: "/x", User: "u", MaxOutput: 9},
	}
	if diff := cmp.Diff(wantReqs, f.execs); diff != "" {
		t.Errorf("execs (-want +got):\n%s", diff)
	}
}

func TestEval(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name   string
		result sandbox.EvalResult
		want   string
	}{
		{"value", sandbox.EvalResult{Result: "2"}, `{"duration_ms":0,"error":null,"exit_code":0,"result":"2","stderr":"","stdout":"","timed_out":false,"truncated":false}`},
		{"nothing", sandbox.EvalResult{Stdout: []byte("hi")}, `{"duration_ms":0,"error":null,"exit_code":0,"result":null,"stderr":"","stdout":"hi","timed_out":false,"truncated":false}`},
		{"error", sandbox.EvalResult{Error: "Traceback"}, `{"duration_ms":0,"error":"Traceback","exit_code":1,"result":null,"stderr":"","stdout":"","timed_out":false,"truncated":false}`},
		{"timeout", sandbox.EvalResult{TimedOut: true}, `{"duration_ms":0,"error":"the code was interrupted after 2s","exit_code":1,"result":null,"stderr":"","stdout":"","timed_out":true,"truncated":false}`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			f.eval = func(sandbox.EvalRequest) (sandbox.EvalResult, error) { return tt.result, nil }
			if got := f.do(t, "POST", "/v1/sandboxes/sb1/eval", `{"code": "1+1", "timeout_secs": 2}`); strings.TrimSpace(got.body) != tt.want {
				t.Errorf("= %s, want %s", got.body, tt.want)
			}
		})
	}
}

func TestListsLiveOnesUnlessAsked(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	for path, want := range map[string]int{"/v1/sandboxes": 1, "/v1/sandboxes?all": 2, "/v1/sandboxes?all=true": 2, "/v1/sandboxes?all=false": 1} {
		var list []api.SandboxInfo
		if err := json.Unmarshal([]byte(f.do(t, "GET", path, "").body), &list); err != nil || len(list) != want {
			t.Errorf("%s = %d sandboxes, %v, want %d", path, len(list), err, want)
		}
	}
}

func TestStream(t *testing.T) {
	t.Parallel()
	t.Run("done", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t)
		got := f.do(t, "POST", "/v1/snapshots", `{"tag": "t", "image": "py"}`, "Accept", "application/x-ndjson")
		if got.status != 200 || got.header.Get("Content-Type") != ndjson {
			t.Errorf("= %d %q", got.status, got.header.Get("Content-Type"))
		}
		events := readEvents(t, got.body)
		if len(events) != 3 || events[0].Step != "boot" || events[1].Total != 2 || events[2].Event != "done" || events[2].Snapshot.Tag != "py" {
			t.Errorf("events = %s", got.body)
		}
	})
	t.Run("fails in the middle", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t)
		f.fail = &sandbox.Error{Code: sandbox.CodeWarmUpFailed, Message: "exit 1", Hint: "look"}
		got := f.do(t, "POST", "/v1/snapshots", `{"tag": "t", "image": "py", "stream": true}`)
		events := readEvents(t, got.body)
		last := events[len(events)-1]
		if got.status != 200 || last.Event != "error" || last.Error.Code != "warm_up_failed" || last.Error.Hint != "look" {
			t.Errorf("= %d %s", got.status, got.body)
		}
	})
	t.Run("fails at once", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t)
		f.snapshot = func(context.Context, func(sandbox.Progress)) (sandbox.Snapshot, error) {
			return sandbox.Snapshot{}, &sandbox.Error{Code: sandbox.CodeSnapshotExists}
		}
		if got := f.do(t, "POST", "/v1/snapshots", `{"tag": "t", "image": "py", "stream": true}`); got.status != 409 || got.code() != "snapshot_exists" {
			t.Errorf("= %d %s, want 409", got.status, got.body)
		}
	})
	t.Run("not asked for", func(t *testing.T) {
		t.Parallel()
		if got := newFixture(t).do(t, "POST", "/v1/images", `{"name": "py"}`); got.status != 201 || !strings.HasPrefix(got.body, `{"created_at_unix"`) {
			t.Errorf("= %d %s, want 201 and the image", got.status, got.body)
		}
	})
}

func readEvents(t *testing.T, body string) []api.ProgressEvent {
	t.Helper()
	var events []api.ProgressEvent
	for line := range strings.Lines(body) {
		var e api.ProgressEvent
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatalf("event %q: %v", line, err)
		}
		events = append(events, e)
	}
	return events
}

// TestClientLeaves holds that sandboxes whose client never learned their ids don't live on.
func TestClientLeaves(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	forking := make(chan struct{})
	f.fork = func(ctx context.Context, _ sandbox.ForkRequest) ([]sandbox.ForkResult, error) {
		close(forking)
		<-ctx.Done()
		a, b := stubSandbox(0), stubSandbox(1)
		return []sandbox.ForkResult{{Sandbox: &a}, {Err: errors.New("x")}, {Sandbox: &b}}, nil
	}
	ctx, cancel := context.WithCancel(t.Context())
	req, _ := http.NewRequestWithContext(ctx, "POST", f.http.URL+"/v1/sandboxes", strings.NewReader(`{"snapshot_tag": "py", "n": 3}`))
	left := make(chan error)
	go func() {
		_, err := http.DefaultClient.Do(req)
		left <- err
	}()
	<-forking
	cancel()
	if err := <-left; !errors.Is(err, context.Canceled) {
		t.Fatalf("client error = %v", err)
	}
	f.http.Close() // waits for the handler
	if diff := cmp.Diff([]string{"sb0", "sb1"}, f.killed); diff != "" {
		t.Errorf("killed (-want +got):\n%s", diff)
	}
}

func TestPanic(t *testing.T) {
	t.Parallel()
	var logged strings.Builder
	f := newFixture(t, func(c *Config) { c.Log = slog.New(slog.NewTextHandler(&logged, nil)) })
	f.exec = func(context.Context, sandbox.ExecRequest) (sandbox.ExecResult, error) { panic("a bug") }
	got := f.do(t, "POST", "/v1/sandboxes/sb1/exec", `{"args": ["a"]}`, "X-Request-Id", "my-id")
	if got.status != 500 || got.code() != "internal" {
		t.Errorf("= %d %s, want 500 internal", got.status, got.body)
	}
	if got := f.do(t, "GET", "/healthz", ""); got.status != 200 {
		t.Errorf("afterwards = %d, want 200", got.status)
	}
	f.http.Close()
	if !strings.Contains(logged.String(), "a bug") || !strings.Contains(logged.String(), "my-id") {
		t.Errorf("log = %s, want the panic and the request id", logged.String())
	}
}

func TestMetrics(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.do(t, "POST", "/v1/sandboxes", `{"snapshot_tag": "py"}`)
	f.do(t, "POST", "/v1/sandboxes", `{`)
	f.do(t, "BREW", "/coffee", "")
	got := f.do(t, "GET", "/metrics", "").body
	for _, line := range []string{
		`forkd_http_requests_total{code="201",method="POST",route="/v1/sandboxes"} 1`,
		`forkd_http_requests_total{code="400",method="POST",route="/v1/sandboxes"} 1`,
		`forkd_http_requests_total{code="404",method="other",route="other"} 1`,
		`forkd_errors_total{code="invalid_argument"} 1`,
		`forkd_sandboxes{state="running"} 3`,
		`forkd_pool_children{state="ready"} 2`,
		`forkd_resident_bytes 99`,
		`forkd_forks_total{result="claim"} 7`,
	} {
		if !strings.Contains(got, line+"\n") {
			t.Errorf("metrics lack %s", line)
		}
	}
}
