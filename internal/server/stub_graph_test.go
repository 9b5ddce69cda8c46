package server

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/forkd/forkd/internal/image"
	"github.com/forkd/forkd/internal/sandbox"
	"github.com/forkd/forkd/internal/transfer"
)

func stubBranch() sandbox.Snapshot {
	snap := stubSnapshot()
	snap.Tag, snap.ParentTag, snap.ParentID, snap.BranchedFrom, snap.Ancestors = "b1", "py", "s1", "sb0", []string{"py"}
	snap.Pause, snap.DiffTime, snap.DiffPhysicalBytes, snap.DiffLogicalBytes = 1500*time.Microsecond, 30*time.Millisecond, 4096, 8192
	return snap
}

func (s *stub) Branch(_ context.Context, _ string, r sandbox.BranchRequest) (sandbox.Snapshot, error) {
	s.branches = append(s.branches, r)
	snap := stubBranch()
	if !r.Wait {
		snap.Status = sandbox.StatusWriting
	}
	return snap, s.fail
}

func (s *stub) ForkRunning(_ context.Context, _ string, r sandbox.ForkRunningRequest) (sandbox.ForkRunningResult, error) {
	s.runningForks = append(s.runningForks, r)
	if s.forkRunning != nil {
		return s.forkRunning(r)
	}
	out := sandbox.ForkRunningResult{Pause: 1500 * time.Microsecond, SnapshotID: "sn9", Tag: r.Tag}
	for i := range r.N {
		sb := stubSandbox(i)
		out.Results = append(out.Results, sandbox.ForkResult{Sandbox: &sb})
	}
	return out, s.fail
}

func (s *stub) SnapshotDiff(_ context.Context, r sandbox.DiffRequest, p func(sandbox.Progress)) (sandbox.Snapshot, error) {
	s.diffs = append(s.diffs, r)
	p(sandbox.Progress{Step: "warm_up", Detail: r.Steps[0].Code})
	return stubBranch(), s.fail
}

func (s *stub) Compact(_ context.Context, from, to string) (sandbox.Snapshot, error) {
	s.compacted = append(s.compacted, from+" "+to)
	snap := stubSnapshot()
	snap.Tag = to
	return snap, s.fail
}

func (s *stub) Tree(context.Context) ([]sandbox.TreeNode, error) {
	return []sandbox.TreeNode{{Snapshot: stubSnapshot(), Sandboxes: []string{"sb0"}, Children: []sandbox.TreeNode{{Snapshot: stubBranch()}}}}, s.fail
}

func suspended() sandbox.Sandbox {
	sb := stubSandbox(0)
	sb.State, sb.PID, sb.Name, sb.SuspendedAt = sandbox.StateSuspended, 0, "w", stubTime.Add(time.Hour)
	sb.AutoSuspend, sb.AutoResume = 90*time.Second, true
	return sb
}

func (s *stub) Suspend(_ context.Context, id string, _ bool) (sandbox.Sandbox, error) {
	s.moved = append(s.moved, "suspend "+id)
	return suspended(), s.fail
}

func (s *stub) Resume(_ context.Context, id string) (sandbox.Sandbox, error) {
	s.moved = append(s.moved, "resume "+id)
	sb := stubSandbox(0)
	sb.Name = "w"
	return sb, s.fail
}

func (s *stub) SandboxByName(_ context.Context, name string) (sandbox.Sandbox, error) {
	if name != "w" {
		return sandbox.Sandbox{}, &sandbox.Error{Code: sandbox.CodeSandboxNotFound, Message: "no sandbox has the name " + name}
	}
	return suspended(), s.fail
}

func (s stubImages) Prune(context.Context) ([]image.Image, error) {
	return []image.Image{stubImage()}, s.fail
}

// stubPacks packs a few words.
type stubPacks struct{ *stub }

const stubPack = "all of a pack"

func (s stubPacks) Head(context.Context, string) (transfer.Head, error) {
	return transfer.Head{ID: "s1", Contents: []byte(`{"id": "s1"}`)}, s.fail
}

func (s stubPacks) Pack(_ context.Context, _ string, w io.Writer, signature []byte) error {
	s.signatures = append(s.signatures, string(signature))
	if s.fail != nil {
		return s.fail
	}
	if _, err := io.WriteString(w, stubPack[:3]); err != nil {
		return err
	}
	if s.packBreaks {
		return errors.New("disk on fire")
	}
	_, err := io.WriteString(w, stubPack[3:])
	return err
}

func (s stubPacks) Unpack(ctx context.Context, r io.Reader, req transfer.UnpackRequest, p func(sandbox.Progress)) (transfer.Unpacked, error) {
	s.unpacks = append(s.unpacks, req)
	if s.fail != nil {
		return transfer.Unpacked{}, s.fail
	}
	if s.unpack != nil {
		return s.unpack(r, p)
	}
	body, err := io.ReadAll(r)
	if err != nil {
		return transfer.Unpacked{}, err
	}
	s.unpacked = append(s.unpacked, string(body))
	p(sandbox.Progress{Step: "unpack", Detail: "image/kernel", Done: 1, Total: 2})
	snap := stubSnapshot()
	snap.Tag = req.Tag
	out := transfer.Unpacked{Snapshot: snap, New: []string{"s1"}, ImageID: "i1", NewImage: true}
	if len(req.Signers) > 0 {
		out.SignedBy = req.Signers[0]
	}
	return out, ctx.Err()
}
