package server

import (
	"net/http"
	"path/filepath"
	"strings"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/internal/netpolicy"
	"github.com/forkd/forkd/internal/sandbox"
)

func (s *Server) listSnapshots(w http.ResponseWriter, r *http.Request) error {
	list, err := s.Service.Snapshots(r.Context())
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, mapped(list, snapshotInfo))
	return nil
}

func (s *Server) createSnapshot(w http.ResponseWriter, r *http.Request) error {
	var body api.SnapshotRequest
	if err := decode(w, r, maxBody, &body, "tag"); err != nil {
		return err
	}
	req, err := s.snapshotRequest(r, body)
	if err != nil {
		return err
	}
	out := newStream(w, r, body.Stream)
	snap, err := s.Service.CreateSnapshot(r.Context(), req, out.step)
	if err != nil {
		return out.fail(r, err)
	}
	info := snapshotInfo(snap)
	out.finish(api.ProgressEvent{Snapshot: &info}, info)
	return nil
}

// snapshotRequest checks a request. Values that need knowledge of the host are the domain's to check.
func (s *Server) snapshotRequest(r *http.Request, b api.SnapshotRequest) (sandbox.SnapshotRequest, error) {
	var none sandbox.SnapshotRequest
	if err := checkTag(b.Tag); err != nil {
		return none, err
	}
	img, err := s.requestedImage(r, b)
	if err != nil {
		return none, err
	}
	timeout, err := duration("timeout_secs", b.TimeoutSecs, maxExecTimeout)
	if err != nil {
		return none, err
	}
	for _, field := range []struct {
		name  string
		value int
	}{{"mem_mib", b.MemMiB}, {"vcpus", b.VCPUs}, {"pool_size", b.PoolSize}, {"boot_wait_secs", b.BootWaitSecs}} {
		if err := between(field.name, field.value, 0, maxSize); err != nil {
			return none, err
		}
	}
	if err := checkEnv(b.Env); err != nil {
		return none, err
	}
	bounds, err := limitsOf(b.Limits, nil)
	if err != nil {
		return none, err
	}
	network, err := networkPolicy(b.Network)
	if err == nil {
		err = trust(r, network)
	}
	if err != nil {
		return none, err
	}
	if network == nil {
		network = &netpolicy.Policy{}
	}
	steps, err := warmUps("warm_up", b.WarmUp)
	return sandbox.SnapshotRequest{Network: *network, Tag: b.Tag, Image: img, MemMiB: b.MemMiB, VCPUs: b.VCPUs, Probe: b.Probe, Timeout: timeout,
		Env: b.Env, PoolSize: b.PoolSize, Limits: bounds, WarmUp: steps}, err
}

// warmUps reads what is to be run before a freeze.
func warmUps(field string, in []api.WarmUp) ([]sandbox.WarmUp, error) {
	var out []sandbox.WarmUp
	for i, w := range in {
		if !w.Kind.Valid() || w.Code == "" {
			return nil, invalid(`one is {"kind": "exec" or "eval", "code": "…"}`, "%s %d has the kind %q and %d bytes of code", field, i, w.Kind, len(w.Code))
		}
		out = append(out, sandbox.WarmUp{Kind: sandbox.WarmUpKind(w.Kind), Code: w.Code})
	}
	return out, nil
}

// requestedImage finds the image in our field, or in the published ones that name files of the host.
func (s *Server) requestedImage(r *http.Request, b api.SnapshotRequest) (string, error) {
	if b.Tap != nil && *b.Tap != "" {
		return "", invalid("leave tap out", "there is no host tap to attach: %q", shorten(*b.Tap))
	}
	if b.Image != "" {
		if !namePattern.MatchString(b.Image) {
			return "", invalid(nameHint, "%q is not the name or id of an image", shorten(b.Image))
		}
		return b.Image, nil
	}
	if b.Rootfs == "" {
		return "", invalid("`forkd image ls` lists the images", "field %q is missing", "image")
	}
	if namePattern.MatchString(b.Rootfs) {
		return b.Rootfs, nil
	}
	list, err := s.images(r)
	if err != nil {
		return "", err
	}
	for _, img := range list {
		if strings.HasPrefix(b.Rootfs, "/") && filepath.Clean(b.Rootfs) == img.Rootfs.Path {
			return img.ID, nil
		}
	}
	return "", invalid("build an image with `forkd image build`, and give its name as image (or as rootfs)",
		"the root file system %q is not of an image of this daemon", shorten(b.Rootfs))
}

func (s *Server) deleteSnapshot(w http.ResponseWriter, r *http.Request) error {
	tag, err := pathTag(r)
	if err != nil {
		return err
	}
	cascade, err := flag(r, "cascade")
	if err != nil {
		return err
	}
	force, err := flag(r, "force")
	if err != nil {
		return err
	}
	mode := sandbox.DeleteSafe
	switch {
	case cascade && force:
		return invalid("cascade deletes what rests on the snapshot, force kills what runs from it: do one after the other", "cascade and force exclude each other")
	case cascade:
		mode = sandbox.DeleteCascade
	case force:
		mode = sandbox.DeleteForce
	}
	if err := s.Service.DeleteSnapshot(r.Context(), tag, mode); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) snapshotInfo(w http.ResponseWriter, r *http.Request) error {
	tag, err := pathTag(r)
	if err != nil {
		return err
	}
	snap, err := s.Service.Snapshot(r.Context(), tag)
	if err != nil {
		return err
	}
	parentHash := ""
	if snap.ParentTag != "" {
		// A parent that went away meanwhile, or is damaged, is no reason to hide its child.
		if parent, err := s.Service.Snapshot(r.Context(), snap.ParentTag); err == nil && parent.ID == snap.ParentID {
			parentHash = parent.ContentHash
		}
	}
	writeJSON(w, http.StatusOK, snapshotDetail(snap, parentHash))
	return nil
}

func (s *Server) verifySnapshot(w http.ResponseWriter, r *http.Request) error {
	tag, err := pathTag(r)
	if err != nil {
		return err
	}
	if err := s.Service.VerifySnapshot(r.Context(), tag); err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, api.VerifyResult{Tag: tag, OK: true})
	return nil
}

func (s *Server) getPool(w http.ResponseWriter, r *http.Request) error {
	tag, err := pathTag(r)
	if err != nil {
		return err
	}
	pool, err := s.Service.Pool(r.Context(), tag)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, poolStatus(pool))
	return nil
}

func (s *Server) setPool(w http.ResponseWriter, r *http.Request) error {
	tag, err := pathTag(r)
	if err != nil {
		return err
	}
	var req api.PoolRequest
	if err := decode(w, r, maxBody, &req, "size"); err != nil {
		return err
	}
	if err := between("size", req.Size, 0, sandbox.MaxForks); err != nil {
		return err
	}
	pool, err := s.Service.SetPool(r.Context(), tag, req.Size)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, poolStatus(pool))
	return nil
}
