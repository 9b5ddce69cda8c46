package server

import (
	"errors"
	"net/http"
	"time"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/internal/keys"
	"github.com/forkd/forkd/internal/sandbox"
)

// keyRing is the daemon's keys, or why it has none.
func (s *Server) keyRing() (*keys.Ring, error) {
	if s.Keys == nil {
		return nil, &sandbox.Error{Code: codeNotFound, Message: "this daemon keeps no keys"}
	}
	return s.Keys, nil
}

// reach is the tenant whose keys somebody may see and touch; "" for all.
func reach(who principal) string {
	if who.tenant == sandbox.DefaultTenant {
		return ""
	}
	return who.tenant
}

func (s *Server) listKeys(w http.ResponseWriter, r *http.Request) error {
	ring, err := s.keyRing()
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, mapped(ring.List(reach(noteOf(r.Context()).who)), keyInfo))
	return nil
}

func (s *Server) createKey(w http.ResponseWriter, r *http.Request) error {
	ring, err := s.keyRing()
	if err != nil {
		return err
	}
	var body api.KeyRequest
	if err := decode(w, r, maxBody, &body, "name", "scope"); err != nil {
		return err
	}
	who := noteOf(r.Context()).who
	if body.Tenant == "" {
		body.Tenant = who.tenant
	}
	if own := reach(who); own != "" && body.Tenant != own {
		return &sandbox.Error{Code: codeForbidden, Message: "keys of other tenants are made by the host's administrators", Hint: "leave tenant out"}
	}
	req := keys.Request{By: who.key, Name: body.Name, Tenant: body.Tenant, Scope: keys.Scope(body.Scope), MaxSandboxes: body.MaxSandboxes, Rate: body.RatePerSec, Burst: body.Burst}
	if body.ExpiresAtUnix < 0 || body.ExpiresAtUnix > maxUnix {
		return invalid("seconds since 1970, 0 for never", "field %q is %d", "expires_at_unix", body.ExpiresAtUnix)
	}
	if body.ExpiresAtUnix > 0 {
		req.ExpiresAt = time.Unix(body.ExpiresAtUnix, 0)
	}
	key, token, err := ring.Create(r.Context(), req)
	if err != nil {
		return keyFault(err)
	}
	noteOf(r.Context()).targets = []string{key.ID}
	w.Header().Set("Cache-Control", "no-store")
	writeJSON(w, http.StatusCreated, api.NewKey{Key: keyInfo(key), Token: token})
	return nil
}

// maxUnix is the end of the year 2200: times up to there fit into nanoseconds.
const maxUnix = 7289654400

func (s *Server) revokeKey(w http.ResponseWriter, r *http.Request) error {
	ring, err := s.keyRing()
	if err != nil {
		return err
	}
	id := r.PathValue("id")
	if !idPattern.MatchString(id) {
		return invalid("`forkd key ls` shows the ids", "%q is not the id of a key", shorten(id))
	}
	if _, err := ring.Revoke(r.Context(), reach(noteOf(r.Context()).who), id); err != nil {
		return keyFault(err)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// keyFault gives an error of the ring its code.
func keyFault(err error) error {
	switch {
	case errors.Is(err, keys.ErrInvalid):
		return &sandbox.Error{Code: sandbox.CodeInvalidArgument, Message: err.Error()}
	case errors.Is(err, keys.ErrExists):
		return &sandbox.Error{Code: codeKeyExists, Message: err.Error(), Hint: "choose another name, or revoke that one"}
	case errors.Is(err, keys.ErrBeyond):
		return &sandbox.Error{Code: codeForbidden, Message: err.Error(), Hint: "ask for less, or ask who runs the daemon"}
	case errors.Is(err, keys.ErrTooMany):
		return &sandbox.Error{Code: sandbox.CodeQuotaExceeded, Message: err.Error(), Hint: "revoke those that nobody needs: `forkd key ls`, `forkd key revoke`"}
	case errors.Is(err, keys.ErrNotFound):
		return &sandbox.Error{Code: codeKeyNotFound, Message: err.Error(), Hint: "`forkd key ls` lists the keys"}
	}
	return err
}

func keyInfo(k keys.Key) api.KeyInfo {
	status := api.KeyInfoStatusValid
	switch {
	case !k.RevokedAt.IsZero():
		status = api.KeyInfoStatusRevoked
	case !k.ExpiresAt.IsZero() && !time.Now().Before(k.ExpiresAt):
		status = api.KeyInfoStatusExpired
	}
	return api.KeyInfo{ID: k.ID, Name: k.Name, Tenant: k.Tenant, Scope: api.KeyScope(k.Scope), Status: status, CreatedAtUnix: k.CreatedAt.Unix(),
		ExpiresAtUnix: unixOrZero(k.ExpiresAt), RevokedAtUnix: unixOrZero(k.RevokedAt), MaxSandboxes: k.MaxSandboxes, RatePerSec: k.Rate, Burst: k.Burst}
}

func (s *Server) shareSnapshot(w http.ResponseWriter, r *http.Request) error {
	tag, err := pathTag(r)
	if err != nil {
		return err
	}
	var body api.SharingRequest
	if err := decode(w, r, maxBody, &body, "public"); err != nil {
		return err
	}
	snap, err := s.Service.ShareSnapshot(r.Context(), tag, body.Public)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, snapshotInfo(snap))
	return nil
}

func (s *Server) shareImage(w http.ResponseWriter, r *http.Request) error {
	name, err := imageName(r)
	if err != nil {
		return err
	}
	var body api.SharingRequest
	if err := decode(w, r, maxBody, &body, "public"); err != nil {
		return err
	}
	img, err := s.Images.Share(r.Context(), name, body.Public)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, imageInfo(img))
	return nil
}
