package server

import (
	"net/http"
	"strconv"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/internal/sandbox"
)

func (s *Server) branch(w http.ResponseWriter, r *http.Request) error {
	id, err := pathID(r)
	if err != nil {
		return err
	}
	var body api.BranchRequest
	if err := decodeOptional(w, r, maxBody, &body); err != nil {
		return err
	}
	req, err := branchRequest(body)
	if err != nil {
		return err
	}
	if err := s.checkParentTag(r, id, body); err != nil {
		return err
	}
	snap, err := s.Service.Branch(r.Context(), id, req)
	if err != nil {
		return err
	}
	status := http.StatusCreated
	if !req.Wait {
		status = http.StatusAccepted
	}
	writeJSON(w, status, snapshotInfo(snap))
	return nil
}

func branchRequest(b api.BranchRequest) (sandbox.BranchRequest, error) {
	var none sandbox.BranchRequest
	if b.Tag != "" {
		if err := checkTag(b.Tag); err != nil {
			return none, err
		}
	}
	mode, err := branchMode(b)
	if err != nil {
		return none, err
	}
	if mode == sandbox.BranchDiff && b.MeasureDiff {
		return none, invalid("leave measure_diff out: a diff is measured anyway", "measure_diff and mode diff exclude each other")
	}
	return sandbox.BranchRequest{Tag: b.Tag, Mode: mode, Wait: b.Wait == nil || *b.Wait, MeasureDiff: b.MeasureDiff, Secrets: b.IncludeSecrets}, nil
}

// branchMode reads the mode, or the booleans that were published before there was one.
func branchMode(b api.BranchRequest) (sandbox.BranchMode, error) {
	const hint = `use "mode": "live", "diff" or "full"`
	switch {
	case b.Mode != "" && !b.Mode.Valid():
		return "", invalid(hint, "field %q is %q", "mode", shorten(string(b.Mode)))
	case b.Mode != "" && (b.Diff || b.Live):
		return "", invalid(hint+" alone", "mode and diff or live exclude each other")
	case b.Diff && b.Live:
		return "", invalid(hint, "diff and live exclude each other")
	case b.Diff:
		return sandbox.BranchDiff, nil
	case b.Live:
		return sandbox.BranchLive, nil
	}
	return sandbox.BranchMode(b.Mode), nil
}

// checkParentTag holds a client to what it believes of the source: our branches rest on the right snapshot whatever it says.
func (s *Server) checkParentTag(r *http.Request, id string, b api.BranchRequest) error {
	if b.ParentTag == "" {
		return nil
	}
	if err := checkTag(b.ParentTag); err != nil {
		return err
	}
	if b.Mode == api.BranchRequestModeFull {
		return invalid("leave parent_tag out, or use mode diff", "a full branch rests on no other snapshot")
	}
	source, err := s.Service.Sandbox(r.Context(), id)
	if err != nil {
		return err
	}
	if source.SnapshotTag != b.ParentTag {
		return invalid("leave parent_tag out: a branch rests on what its source came from",
			"sandbox %s came from snapshot %q, not from %s", id, source.SnapshotTag, b.ParentTag)
	}
	return nil
}

func (s *Server) forkRunning(w http.ResponseWriter, r *http.Request) error {
	id, err := pathID(r)
	if err != nil {
		return err
	}
	var body api.ForkRunningRequest
	if err := decodeOptional(w, r, maxBody, &body); err != nil {
		return err
	}
	req, err := forkRunningRequest(body)
	if err == nil {
		err = trust(r, req.Network)
	}
	if err != nil {
		return err
	}
	res, err := s.Service.ForkRunning(r.Context(), id, req)
	if err != nil {
		return err
	}
	if err := r.Context().Err(); err != nil {
		s.abandon(r, res.Results)
		return err
	}
	report, first := forkReport(res.Results)
	noteSandboxes(r.Context(), report.Sandboxes)
	var whole any
	if body.Report {
		whole = api.ForkRunningReport{Sandboxes: report.Sandboxes, Errors: report.Errors, PauseMS: millis(res.Pause), SnapshotID: res.SnapshotID, Tag: orNull(res.Tag)}
	}
	if len(report.Sandboxes) == 0 && first != nil && (whole == nil || res.Tag == "") {
		return first
	}
	w.Header().Set("Forkd-Pause-Ms", strconv.FormatFloat(millis(res.Pause), 'f', -1, 64))
	writeForked(w, report, whole)
	return nil
}

func forkRunningRequest(b api.ForkRunningRequest) (sandbox.ForkRunningRequest, error) {
	var none sandbox.ForkRunningRequest
	n := 1
	if b.N != nil {
		n = *b.N
	}
	if err := between("n", n, 1, sandbox.MaxForks); err != nil {
		return none, err
	}
	if b.Tag != "" {
		if err := checkTag(b.Tag); err != nil {
			return none, err
		}
	}
	timeout, err := duration("timeout_secs", b.TimeoutSecs, maxLife)
	if err != nil {
		return none, err
	}
	bounds, err := limitsOf(b.Limits, b.MemoryLimitMiB)
	if err != nil {
		return none, err
	}
	network, err := networkPolicy(b.Network)
	if err != nil {
		return none, err
	}
	return sandbox.ForkRunningRequest{Network: network, N: n, Tag: b.Tag, Env: b.Env, Metadata: b.Metadata, Timeout: timeout, Limits: bounds, Secrets: b.IncludeSecrets}, checkEnv(b.Env)
}

func (s *Server) suspend(w http.ResponseWriter, r *http.Request) error {
	id, err := pathID(r)
	if err != nil {
		return err
	}
	var body api.SuspendRequest
	if err := decodeOptional(w, r, maxBody, &body); err != nil {
		return err
	}
	sb, err := s.Service.Suspend(r.Context(), id, body.IncludeSecrets)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, sandboxInfo(sb))
	return nil
}

func (s *Server) resume(w http.ResponseWriter, r *http.Request) error {
	id, err := pathID(r)
	if err != nil {
		return err
	}
	sb, err := s.Service.Resume(r.Context(), id)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, sandboxInfo(sb))
	return nil
}

func (s *Server) diff(w http.ResponseWriter, r *http.Request) error {
	from, err := pathTag(r)
	if err != nil {
		return err
	}
	var body api.DiffRequest
	if err := decode(w, r, maxBody, &body, "tag", "steps"); err != nil {
		return err
	}
	req, err := diffRequest(from, body)
	if err != nil {
		return err
	}
	out := newStream(w, r, body.Stream)
	snap, err := s.Service.SnapshotDiff(r.Context(), req, out.step)
	if err != nil {
		return out.fail(r, err)
	}
	info := snapshotInfo(snap)
	out.finish(api.ProgressEvent{Snapshot: &info}, info)
	return nil
}

func diffRequest(from string, b api.DiffRequest) (sandbox.DiffRequest, error) {
	var none sandbox.DiffRequest
	if err := checkTag(b.Tag); err != nil {
		return none, err
	}
	if len(b.Steps) == 0 {
		return none, invalid(`one is {"kind": "exec" or "eval", "code": "…"}`, "field %q has nothing to run in it", "steps")
	}
	steps, err := warmUps("step", b.Steps)
	if err != nil {
		return none, err
	}
	timeout, err := duration("timeout_secs", b.TimeoutSecs, maxExecTimeout)
	if err != nil {
		return none, err
	}
	return sandbox.DiffRequest{From: from, Tag: b.Tag, Steps: steps, Timeout: timeout, Env: b.Env}, checkEnv(b.Env)
}

func (s *Server) compact(w http.ResponseWriter, r *http.Request) error {
	from, err := pathTag(r)
	if err != nil {
		return err
	}
	var body api.CompactRequest
	if err := decode(w, r, maxBody, &body, "to"); err != nil {
		return err
	}
	if err := checkTag(body.To); err != nil {
		return err
	}
	snap, err := s.Service.Compact(r.Context(), from, body.To)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusCreated, snapshotInfo(snap))
	return nil
}

func (s *Server) tree(w http.ResponseWriter, r *http.Request) error {
	roots, err := s.Service.Tree(r.Context())
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, mapped(roots, treeNode))
	return nil
}

func treeNode(n sandbox.TreeNode) api.TreeNode {
	return api.TreeNode{Snapshot: snapshotInfo(n.Snapshot), Sandboxes: orEmpty(n.Sandboxes), Children: mapped(n.Children, treeNode)}
}
