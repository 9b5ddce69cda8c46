package server

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/client"
	"github.com/forkd/forkd/internal/sandbox"
)

// newClient connects the Go client to a fixture over a Unix socket.
func newClient(t *testing.T, f *fixture) *client.Client {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := ListenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: f.server.Handler(true), ConnContext: withPeer}
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = srv.Serve(l)
	}()
	t.Cleanup(func() {
		srv.Close()
		<-served
	})
	c, err := client.New(client.Config{URL: path})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func TestClientCalls(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	c := newClient(t, f)
	ctx := t.Context()
	var steps []string
	progress := func(p client.Progress) { steps = append(steps, p.Step) }
	calls := map[string]func() (any, error){
		"Health":  func() (any, error) { return true, c.Health(ctx) },
		"Version": func() (any, error) { v, err := c.Version(ctx); return v.Version, err },
		"Metrics": func() (any, error) { b, err := c.Metrics(ctx); return strings.Contains(string(b), "forkd_"), err },
		"Images":  func() (any, error) { l, err := c.Images(ctx); return l[0].ID, err },
		"Image":   func() (any, error) { i, err := c.Image(ctx, "py"); return i.ID, err },
		"BuildImage": func() (any, error) {
			i, err := c.BuildImage(ctx, client.ImageBuildRequest{Name: "py"}, progress)
			return i.ID, err
		},
		"DeleteImage": func() (any, error) { return true, c.DeleteImage(ctx, "py") },
		"Snapshots":   func() (any, error) { l, err := c.Snapshots(ctx); return l[0].Tag, err },
		"CreateSnapshot": func() (any, error) {
			s, err := c.CreateSnapshot(ctx, client.SnapshotRequest{Tag: "t", Image: "py"}, nil)
			return s.ID, err
		},
		"SnapshotInfo":   func() (any, error) { d, err := c.SnapshotInfo(ctx, "py"); return d.ContentHash, err },
		"DeleteSnapshot": func() (any, error) { return true, c.DeleteSnapshot(ctx, "py", client.DeleteCascade) },
		"VerifySnapshot": func() (any, error) { return true, c.VerifySnapshot(ctx, "py") },
		"Pool":           func() (any, error) { p, err := c.Pool(ctx, "py"); return p.Size, err },
		"SetPool":        func() (any, error) { p, err := c.SetPool(ctx, "py", 5); return p.Size, err },
		"Fork": func() (any, error) {
			l, err := c.Fork(ctx, client.ForkRequest{SnapshotTag: "py", N: client.Int(2)})
			return len(l), err
		},
		"Sandboxes": func() (any, error) { l, err := c.Sandboxes(ctx, true); return len(l), err },
		"Sandbox":   func() (any, error) { s, err := c.Sandbox(ctx, "sb0"); return s.ID, err },
		"Kill":      func() (any, error) { return true, c.Kill(ctx, "sb0") },
		"Extend":    func() (any, error) { s, err := c.Extend(ctx, "sb0", time.Minute); return s.ID, err },
		"Stats":     func() (any, error) { s, err := c.Stats(ctx, "sb0"); return int(s.GuestAnonKiB), err },
		"Ping":      func() (any, error) { p, err := c.Ping(ctx, "sb0"); return p.AgentVersion, err },
		"Exec": func() (any, error) {
			r, err := c.Exec(ctx, "sb0", client.ExecRequest{Args: []string{"a"}, Stdin: []byte{255}, Timeout: time.Second})
			return string(r.Stderr), err
		},
		"Eval": func() (any, error) {
			r, err := c.Eval(ctx, "sb0", client.EvalRequest{Code: "1+1"})
			return *r.Result, err
		},
		"Logs":        func() (any, error) { b, err := c.Logs(ctx, "sb0"); return string(b), err },
		"PruneImages": func() (any, error) { l, err := c.PruneImages(ctx); return len(l), err },
		"Branch": func() (any, error) {
			s, err := c.Branch(ctx, "sb0", client.BranchRequest{Mode: client.BranchDiff, Wait: client.Bool(false)})
			return string(s.Status), err
		},
		"ForkRunning": func() (any, error) {
			r, err := c.ForkRunning(ctx, "sb0", client.ForkRunningRequest{N: client.Int(3), Tag: "b"})
			return fmt.Sprintf("%d %v %s %s", len(r.Sandboxes), r.PauseMS, r.SnapshotID, r.Tag), err
		},
		"Suspend": func() (any, error) { s, err := c.Suspend(ctx, "sb0"); return string(s.State), err },
		"Resume":  func() (any, error) { s, err := c.Resume(ctx, "sb0"); return string(s.State), err },
		"SnapshotDiff": func() (any, error) {
			s, err := c.SnapshotDiff(ctx, "py", client.DiffRequest{Tag: "b", Steps: []client.WarmUp{{Kind: "exec", Code: "true"}}}, nil)
			return s.ParentTag, err
		},
		"Compact":    func() (any, error) { s, err := c.Compact(ctx, "py", "flat"); return s.Tag, err },
		"Tree":       func() (any, error) { l, err := c.Tree(ctx); return l[0].Children[0].Snapshot.Tag, err },
		"Workspaces": func() (any, error) { l, err := c.Workspaces(ctx); return len(l), err },
		"CreateWorkspace": func() (any, error) {
			w, err := c.CreateWorkspace(ctx, client.WorkspaceRequest{Name: "w", SnapshotTag: "py"})
			return string(w.Status), err
		},
		"Workspace":        func() (any, error) { w, err := c.Workspace(ctx, "w"); return w.Name, err },
		"DeleteWorkspace":  func() (any, error) { return true, c.DeleteWorkspace(ctx, "w") },
		"SuspendWorkspace": func() (any, error) { w, err := c.SuspendWorkspace(ctx, "w"); return string(w.Status), err },
		"ResumeWorkspace":  func() (any, error) { w, err := c.ResumeWorkspace(ctx, "w"); return string(w.Status), err },
	}
	got := map[string]any{}
	for name, call := range calls {
		v, err := call()
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		got[name] = v
	}
	want := map[string]any{
		"Health": true, "Version": "test", "Metrics": true, "Images": "i1", "Image": "i1", "BuildImage": "i1", "DeleteImage": true,
		"Snapshots": "py", "CreateSnapshot": "s1", "SnapshotInfo": "abc", "DeleteSnapshot": true, "VerifySnapshot": true, "Pool": 2, "SetPool": 5,
		"Fork": 2, "Sandboxes": 2, "Sandbox": "sb0", "Kill": true, "Extend": "sb0", "Stats": 400, "Ping": "1", "Exec": "err\xff\n", "Eval": "2", "Logs": "console\xff\n",
		"PruneImages": 1, "Branch": "writing", "ForkRunning": "3 1.5 sn9 b", "Suspend": "suspended", "Resume": "running", "SnapshotDiff": "py", "Compact": "flat",
		"Tree": "b1", "Workspaces": 0, "CreateWorkspace": "running", "Workspace": "w", "DeleteWorkspace": true, "SuspendWorkspace": "suspended", "ResumeWorkspace": "running",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("answers (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"rootfs"}, steps); diff != "" {
		t.Errorf("steps (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]sandbox.ExecRequest{{Args: []string{"a"}, Stdin: []byte{255}, Timeout: time.Second}}, f.execs); diff != "" {
		t.Errorf("exec (-want +got):\n%s", diff)
	}
	if len(f.deleted) != 1 || f.deleted[0] != sandbox.DeleteCascade || len(f.extended) != 1 || f.extended[0] != time.Minute {
		t.Errorf("deleted %v, extended %v", f.deleted, f.extended)
	}
}

func TestClientErrors(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	c := newClient(t, f)
	t.Run("of the daemon", func(t *testing.T) {
		f.fail = &sandbox.Error{Code: sandbox.CodeQueueFull, Message: "the queue is full", Hint: "wait", RetryAfter: 3 * time.Second}
		_, err := c.Fork(t.Context(), client.ForkRequest{SnapshotTag: "py"})
		var e *client.Error
		if !errors.As(err, &e) {
			t.Fatalf("err = %v", err)
		}
		want := client.Error{Status: 503, Code: "queue_full", Message: "the queue is full", Hint: "wait", RetryAfter: 3 * time.Second, RequestID: e.RequestID}
		if diff := cmp.Diff(want, *e); diff != "" || e.RequestID == "" {
			t.Errorf("error (-want +got):\n%s", diff)
		}
	})
	t.Run("at the end of a stream", func(t *testing.T) {
		f.fail = &sandbox.Error{Code: sandbox.CodeWarmUpFailed, Message: "exit 1"}
		_, err := c.CreateSnapshot(t.Context(), client.SnapshotRequest{Tag: "t", Image: "py"}, nil)
		if !client.IsCode(err, "warm_up_failed") {
			t.Errorf("err = %v, want warm_up_failed", err)
		}
	})
	t.Run("of some children", func(t *testing.T) {
		f.fail = nil
		f.fork = func(context.Context, sandbox.ForkRequest) ([]sandbox.ForkResult, error) {
			sb := stubSandbox(0)
			return []sandbox.ForkResult{{Err: &sandbox.Error{Code: sandbox.CodeTimeout, Message: "too slow"}}, {Sandbox: &sb}}, nil
		}
		list, err := c.Fork(t.Context(), client.ForkRequest{SnapshotTag: "py", N: client.Int(2)})
		var partial *client.PartialError
		if !errors.As(err, &partial) || len(list) != 1 || len(partial.Sandboxes) != 1 {
			t.Fatalf("= %v, %v, want one sandbox and a PartialError", list, err)
		}
		if diff := cmp.Diff([]api.ForkError{{Index: 0, Code: "timeout", Error: "too slow"}}, partial.Failures); diff != "" {
			t.Errorf("failures (-want +got):\n%s", diff)
		}
		if got := err.Error(); got != "1 of 2 sandboxes failed; the first (number 0): too slow" {
			t.Errorf("message = %q", got)
		}
	})
	t.Run("connection cut in a stream", func(t *testing.T) {
		f.snapshot = func(_ context.Context, p func(sandbox.Progress)) (sandbox.Snapshot, error) {
			p(sandbox.Progress{Step: "boot"})
			panic(http.ErrAbortHandler)
		}
		_, err := c.CreateSnapshot(t.Context(), client.SnapshotRequest{Tag: "t", Image: "py"}, nil)
		if !client.IsCode(err, client.CodeNoDaemon) || !strings.Contains(err.Error(), "closed the connection") {
			t.Errorf("err = %v, want a closed connection", err)
		}
	})
	t.Run("context", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := c.Snapshots(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("err = %v, want context.Canceled", err)
		}
	})
}

func TestClientRepeats(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	c := newClient(t, f)
	ctx := client.WithIdempotencyKey(t.Context(), "k")
	for range 2 {
		if _, err := c.Fork(ctx, client.ForkRequest{SnapshotTag: "py"}); err != nil {
			t.Fatal(err)
		}
	}
	if len(f.forks) != 1 {
		t.Errorf("%d forks, want 1", len(f.forks))
	}
}

func TestClientFindsNoDaemon(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	// Something that is not a daemon of ours.
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: http.NotFoundHandler()}
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(func() { srv.Close() })
	tests := []struct{ name, url, code, hint string }{
		{"no socket", filepath.Join(dir, "none"), client.CodeNoDaemon, "forkd serve"},
		{"no port", "http://127.0.0.1:1", client.CodeNoDaemon, "forkd serve"},
		{"another server", "http://" + l.Addr().String(), client.CodeUnexpected, "FORKD_URL"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c, err := client.New(client.Config{URL: tt.url})
			if err != nil {
				t.Fatal(err)
			}
			_, err = c.Snapshots(t.Context())
			var e *client.Error
			if !errors.As(err, &e) || e.Code != tt.code || !strings.Contains(e.Hint, tt.hint) {
				t.Errorf("err = %#v, want %s with a hint about %s", err, tt.code, tt.hint)
			}
		})
	}
}
