package server

import (
	"cmp"
	"context"
	"maps"
	"net/http"
	"slices"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/internal/sandbox"
)

// A workspace is a sandbox with a name: these routes are the published words for it.

func (s *Server) listWorkspaces(w http.ResponseWriter, r *http.Request) error {
	list, err := s.Service.Sandboxes(r.Context())
	if err != nil {
		return err
	}
	ended, err := s.Service.Ended(r.Context())
	if err != nil {
		return err
	}
	byName := map[string]sandbox.Sandbox{}
	for _, sb := range append(list, ended...) { // those that live first, then those that ended last
		if _, newer := byName[sb.Name]; sb.Name != "" && !newer {
			byName[sb.Name] = sb
		}
	}
	named := slices.SortedFunc(maps.Values(byName), func(a, b sandbox.Sandbox) int { return cmp.Compare(a.Name, b.Name) })
	writeJSON(w, http.StatusOK, mapped(named, workspaceInfo))
	return nil
}

// workspaceInfo is a sandbox as a workspace.
func workspaceInfo(sb sandbox.Sandbox) api.WorkspaceInfo {
	active := sb.CreatedAt
	info := api.WorkspaceInfo{ID: sb.ID, Name: sb.Name, SourceSnapshotTag: sb.SnapshotTag, CreatedAtUnix: sb.CreatedAt.Unix()}
	switch sb.State {
	case sandbox.StateStarting, sandbox.StateRunning:
		info.Status, info.LiveSandboxID = api.WorkspaceInfoStatusRunning, sb.ID
	case sandbox.StateSuspended:
		info.Status, active = api.WorkspaceInfoStatusSuspended, sb.SuspendedAt
	default:
		info.Status, info.Reason, active = api.WorkspaceInfoStatusStale, sb.Reason, sb.EndedAt
	}
	info.LastActiveUnix = active.Unix()
	return info
}

func (s *Server) createWorkspace(w http.ResponseWriter, r *http.Request) error {
	var body api.WorkspaceRequest
	if err := decode(w, r, maxBody, &body, "name", "snapshot_tag"); err != nil {
		return err
	}
	if err := checkName(body.Name); err != nil {
		return err
	}
	req, err := forkRequest(api.ForkRequest{SnapshotTag: body.SnapshotTag, Name: body.Name, Env: body.Env, Metadata: body.Metadata,
		TimeoutSecs: body.TimeoutSecs, MemoryLimitMiB: body.MemoryLimitMiB, Limits: body.Limits, AutoSuspendSecs: body.AutoSuspendSecs, AutoResume: body.AutoResume, Secrets: body.Secrets, SecretEnv: body.SecretEnv})
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
	if err := results[0].Err; err != nil {
		return err
	}
	writeJSON(w, http.StatusCreated, workspaceInfo(*results[0].Sandbox))
	return nil
}

// workspace finds the sandbox that a request is about.
func (s *Server) workspace(r *http.Request) (sandbox.Sandbox, error) {
	name := r.PathValue("name")
	if err := checkName(name); err != nil {
		return sandbox.Sandbox{}, err
	}
	return s.Service.SandboxByName(r.Context(), name)
}

func (s *Server) getWorkspace(w http.ResponseWriter, r *http.Request) error {
	sb, err := s.workspace(r)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, workspaceInfo(sb))
	return nil
}

func (s *Server) deleteWorkspace(w http.ResponseWriter, r *http.Request) error {
	sb, err := s.workspace(r)
	if err != nil {
		return err
	}
	if err := s.Service.Kill(r.Context(), sb.ID); err != nil {
		return err
	}
	// What had the name before would stand there as stale instead.
	ended, err := s.Service.Ended(r.Context())
	if err != nil {
		return err
	}
	for _, old := range ended {
		if old.Name == sb.Name {
			if err := s.Service.Kill(r.Context(), old.ID); err != nil && sandbox.CodeOf(err) != sandbox.CodeSandboxNotFound {
				return err
			}
		}
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) suspendWorkspace(w http.ResponseWriter, r *http.Request) error {
	var body api.SuspendRequest
	if err := decodeOptional(w, r, maxBody, &body); err != nil {
		return err
	}
	return s.moveWorkspace(w, r, func(ctx context.Context, id string) (sandbox.Sandbox, error) {
		return s.Service.Suspend(ctx, id, body.IncludeSecrets)
	})
}

func (s *Server) resumeWorkspace(w http.ResponseWriter, r *http.Request) error {
	return s.moveWorkspace(w, r, s.Service.Resume)
}

// moveWorkspace brings a workspace into another state.
func (s *Server) moveWorkspace(w http.ResponseWriter, r *http.Request, move func(context.Context, string) (sandbox.Sandbox, error)) error {
	sb, err := s.workspace(r)
	if err != nil {
		return err
	}
	moved, err := move(r.Context(), sb.ID)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, workspaceInfo(moved))
	return nil
}
