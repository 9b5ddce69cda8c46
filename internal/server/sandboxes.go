package server

import (
	"context"
	"net/http"
	"strconv"
	"strings"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/internal/sandbox"
)

func (s *Server) listSandboxes(w http.ResponseWriter, r *http.Request) error {
	all, err := flag(r, "all")
	if err != nil {
		return err
	}
	list, err := s.Service.Sandboxes(r.Context())
	if err != nil {
		return err
	}
	if all {
		ended, err := s.Service.Ended(r.Context())
		if err != nil {
			return err
		}
		list = append(list, ended...)
	}
	writeJSON(w, http.StatusOK, mapped(list, sandboxInfo))
	return nil
}

func (s *Server) getSandbox(w http.ResponseWriter, r *http.Request) error {
	id, err := pathID(r)
	if err != nil {
		return err
	}
	sb, err := s.Service.Sandbox(r.Context(), id)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, sandboxInfo(sb))
	return nil
}

func (s *Server) killSandbox(w http.ResponseWriter, r *http.Request) error {
	id, err := pathID(r)
	if err != nil {
		return err
	}
	if err := s.Service.Kill(r.Context(), id); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) extend(w http.ResponseWriter, r *http.Request) error {
	id, err := pathID(r)
	if err != nil {
		return err
	}
	var req api.TimeoutRequest
	if err := decode(w, r, maxBody, &req, "timeout_secs"); err != nil {
		return err
	}
	timeout, err := duration("timeout_secs", req.TimeoutSecs, maxLife)
	if err != nil {
		return err
	}
	sb, err := s.Service.Extend(r.Context(), id, timeout)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, sandboxInfo(sb))
	return nil
}

func (s *Server) fork(w http.ResponseWriter, r *http.Request) error {
	var body api.ForkRequest
	if err := decode(w, r, maxBody, &body, "snapshot_tag"); err != nil {
		return err
	}
	req, err := forkRequest(body)
	if err == nil {
		err = trust(r, req.Network)
	}
	if err != nil {
		return err
	}
	results, err := s.Service.Fork(r.Context(), req)
	if err != nil {
		return err
	}
	if err := r.Context().Err(); err != nil {
		s.abandon(r, results)
		return err
	}
	report, first := forkReport(results)
	noteSandboxes(r.Context(), report.Sandboxes)
	if len(report.Sandboxes) == 0 && first != nil {
		return first
	}
	var whole any
	if body.Report {
		whole = report
	}
	writeForked(w, report, whole)
	return nil
}

func forkRequest(b api.ForkRequest) (sandbox.ForkRequest, error) {
	var none sandbox.ForkRequest
	if err := checkTag(b.SnapshotTag); err != nil {
		return none, err
	}
	n := 1
	if b.N != nil {
		n = *b.N
	}
	if err := between("n", n, 1, sandbox.MaxForks); err != nil {
		return none, err
	}
	timeout, err := duration("timeout_secs", b.TimeoutSecs, maxLife)
	if err != nil {
		return none, err
	}
	bounds, err := limitsOf(b.Limits, b.MemoryLimitMiB)
	if err != nil {
		return none, err
	}
	if err := checkEnv(b.Env); err != nil {
		return none, err
	}
	idle, err := duration("auto_suspend_secs", b.AutoSuspendSecs, maxLife)
	if err != nil {
		return none, err
	}
	if b.Name != "" {
		if err := checkName(b.Name); err != nil {
			return none, err
		}
		if n != 1 {
			return none, invalid("leave the name out, or ask for one sandbox", "%d sandboxes can't all be named %q", n, b.Name)
		}
	}
	network, err := networkPolicy(b.Network)
	if err != nil {
		return none, err
	}
	path, err := forkPath(b.Path)
	return sandbox.ForkRequest{Network: network, Tag: b.SnapshotTag, N: n, Env: b.Env, Metadata: b.Metadata, Timeout: timeout,
		Limits: bounds, Path: path, Name: b.Name, AutoSuspend: idle, AutoResume: b.AutoResume, Secrets: b.Secrets, SecretEnv: b.SecretEnv}, err
}

func forkPath(p api.ForkRequestPath) (sandbox.Path, error) {
	switch p {
	case "", api.ForkRequestPathAny:
		return sandbox.PathAny, nil
	case api.ForkRequestPathCold:
		return sandbox.PathCold, nil
	case api.ForkRequestPathPool:
		return sandbox.PathPool, nil
	}
	return "", invalid("use any, cold or pool", "field %q is %q", "path", shorten(string(p)))
}

// abandon kills the sandboxes of a client that left before it could learn their ids.
func (s *Server) abandon(r *http.Request, results []sandbox.ForkResult) {
	ctx := context.WithoutCancel(r.Context())
	for _, res := range results {
		if res.Err != nil || res.Sandbox == nil {
			continue
		}
		if err := s.Service.Kill(ctx, res.Sandbox.ID); err != nil {
			s.Log.Error("kill a sandbox whose client left", "request_id", requestID(ctx), "sandbox", res.Sandbox.ID, "error", err)
		}
	}
}

// forkReport sorts the children of a fork into those that are ready and those that failed. first is the first one's error.
func forkReport(results []sandbox.ForkResult) (report api.ForkReport, first error) {
	report = api.ForkReport{Sandboxes: []api.SandboxInfo{}, Errors: []api.ForkError{}}
	for i, res := range results {
		if res.Err == nil {
			report.Sandboxes = append(report.Sandboxes, sandboxInfo(*res.Sandbox))
			continue
		}
		if first == nil {
			first = res.Err
		}
		e := describe(res.Err)
		report.Errors = append(report.Errors, api.ForkError{Index: i, Error: e.Error, Code: e.Code, Hint: e.Hint, RetryAfterSecs: e.RetryAfterSecs})
	}
	return report, first
}

// writeForked answers a fork; docs/decisions/0002-partial-fork-results.md says why in this way. whole is what is answered to who asked for
// a report; nil: nobody did.
func writeForked(w http.ResponseWriter, report api.ForkReport, whole any) {
	status := http.StatusCreated
	if len(report.Errors) > 0 {
		w.Header().Set("Forkd-Failed", strconv.Itoa(len(report.Errors)))
		w.Header().Set("Forkd-Error", headerSafe(report.Errors[0].Code+": "+report.Errors[0].Error))
		status = http.StatusMultiStatus
	}
	if whole == nil {
		writeJSON(w, http.StatusCreated, report.Sandboxes)
		return
	}
	writeJSON(w, status, whole)
}

// headerSafe keeps a message on one line of a header.
func headerSafe(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return ' '
		}
		return r
	}, shorten(s))
}
