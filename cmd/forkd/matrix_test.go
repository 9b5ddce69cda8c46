package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/getkin/kin-openapi/openapi3"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/internal/store"
)

// credentials are the keys of the matrix; each but the first two is in the database before the daemon starts.
var credentials = []struct {
	name, tenant, scope string
	expired, revoked    bool
}{
	{name: "none"}, {name: "wrong"},
	{name: "expired", tenant: "acme", scope: "admin", expired: true},
	{name: "revoked", tenant: "acme", scope: "admin", revoked: true},
	{name: "read", tenant: "acme", scope: "read"},
	{name: "run", tenant: "acme", scope: "run"},
	{name: "admin", tenant: "acme", scope: "admin"},
	{name: "other", tenant: "rival", scope: "admin"},
	{name: "host-read", tenant: "default", scope: "read"},
	{name: "host-admin", tenant: "default", scope: "admin"},
}

// tokenOf is the bearer token of a credential. What is wrong with "wrong" is its secret alone.
func tokenOf(name string) string {
	switch name {
	case "none":
		return ""
	case "wrong":
		return strings.TrimRight(tokenOf("admin"), "0") + strings.Repeat("1", len(tokenOf("admin"))-len(strings.TrimRight(tokenOf("admin"), "0")))
	}
	return "fk_" + idOf(name) + "_" + fmt.Sprintf("%060x", sha256.Sum256([]byte(name)))[:60] + "0000"
}

func idOf(name string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte("id "+name)))[:12] }

// plantKeys writes the keys into the database of a daemon that does not run yet.
func plantKeys(t *testing.T, data string) {
	t.Helper()
	db, err := store.Open(filepath.Join(data, "forkd.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	for i, c := range credentials[2:] {
		k := store.Key{ID: idOf(c.name), Name: c.name, Tenant: c.tenant, Scope: c.scope, Hash: sha256.Sum256([]byte(tokenOf(c.name))), CreatedAt: time.Unix(int64(i+1), 0)}
		if c.expired {
			k.ExpiresAt = time.Unix(1000, 0)
		}
		if err := db.AddKey(t.Context(), k); err != nil {
			t.Fatal(err)
		}
		if c.revoked {
			if err := db.RevokeKey(t.Context(), k.ID, time.Unix(1000, 0)); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// covers says whether a credential is good for what x-forkd-access asks.
func covers(access string, tenant, scope string) bool {
	order := []string{"read", "run", "admin"}
	need, host := strings.CutPrefix(access, "host-")
	return slices.Index(order, scope) >= slices.Index(order, need) && (!host || tenant == "default")
}

// matrix is a daemon with the things of tenant acme that the others ask for.
type matrix struct {
	*liveDaemon
	sandbox, workspace string
	made               int
}

// try is one request: of whom it is about something is told by the verbs in it.
type try struct {
	path, body string
	status     int                    // for who may
	fresh      func(m *matrix) string // makes what the request uses up, for who may; its result stands for %s
	host       bool                   // what it is about is the default tenant's
	extra      map[string]string      // headers
}

// tries are the requests of the matrix by operationId: every operation of openapi.yaml has one.
func tries() map[string]try {
	sandbox := func(m *matrix) string { return m.fork("acmetag", "") }
	workspace := func(m *matrix) string { name := m.name("w"); m.fork("acmetag", name); return name }
	snapshot := func(m *matrix) string {
		tag := m.name("s")
		m.must(201, "admin", "POST", "/v1/snapshots/acmetag/compact", `{"to": "`+tag+`"}`)
		return tag
	}
	tag := func(m *matrix) string { return m.name("t") }
	return map[string]try{
		"getHealth": {path: "/healthz", status: 200}, "getVersion": {path: "/version", status: 200}, "getMetrics": {path: "/metrics", status: 200},
		"getSpec": {path: "/openapi.yaml", status: 200}, "getEvents": {path: "/v1/events", status: 200}, "getTree": {path: "/v1/tree", status: 200},
		"listKeys":  {path: "/v1/keys", status: 200},
		"createKey": {path: "/v1/keys", body: `{"name": "%s", "scope": "read"}`, status: 201, fresh: tag},
		"revokeKey": {path: "/v1/keys/%s", status: 204, host: true, fresh: func(m *matrix) string {
			var made api.NewKey
			m.decode(m.must(201, "admin", "POST", "/v1/keys", `{"name": "`+m.name("k")+`", "scope": "read"}`), &made)
			return made.Key.ID
		}},
		"listImages": {path: "/v1/images", status: 200}, "getImage": {path: "/v1/images/ours", status: 200},
		"buildImage":  {path: "/v1/images", body: `{"name": "own", "kernel": "/nowhere", "rootfs": "/nowhere"}`, status: 400, host: true},
		"pruneImages": {path: "/v1/images/prune", status: 200, host: true},
		"shareImage":  {path: "/v1/images/base/sharing", body: `{"public": true}`, status: 200, host: true},
		"deleteImage": {path: "/v1/images/base", status: 409, host: true},

		"listSnapshots":   {path: "/v1/snapshots", status: 200},
		"createSnapshot":  {path: "/v1/snapshots", body: `{"tag": "%s", "image": "ours", "mem_mib": 16}`, status: 201, fresh: tag},
		"unpackSnapshot":  {path: "/v1/snapshots/unpack", body: "no pack", status: 422, extra: map[string]string{"Content-Type": "application/octet-stream"}},
		"deleteSnapshot":  {path: "/v1/snapshots/%s", status: 204, fresh: snapshot},
		"shareSnapshot":   {path: "/v1/snapshots/base/sharing", body: `{"public": true}`, status: 200, host: true},
		"getSnapshotInfo": {path: "/v1/snapshots/TAG/info", status: 200}, "verifySnapshot": {path: "/v1/snapshots/TAG/verify", status: 200},
		"diffSnapshot":    {path: "/v1/snapshots/TAG/diff", body: `{"tag": "%s", "steps": [{"kind": "exec", "code": "true"}]}`, status: 201, fresh: tag},
		"compactSnapshot": {path: "/v1/snapshots/TAG/compact", body: `{"to": "%s"}`, status: 201, fresh: tag},
		"packSnapshot":    {path: "/v1/snapshots/TAG/pack", status: 200}, "getPackContents": {path: "/v1/snapshots/TAG/pack/contents", status: 200},
		"getPool": {path: "/v1/snapshots/TAG/pool", status: 200}, "setPool": {path: "/v1/snapshots/TAG/pool", body: `{"size": 0}`, status: 200},

		"listSandboxes": {path: "/v1/sandboxes?all=true", status: 200}, "fork": {path: "/v1/sandboxes", body: `{"snapshot_tag": "TAG"}`, status: 201},
		"getSandbox": {path: "/v1/sandboxes/SANDBOX", status: 200}, "killSandbox": {path: "/v1/sandboxes/%s", status: 204, fresh: sandbox},
		"pingSandbox": {path: "/v1/sandboxes/SANDBOX/ping", status: 200}, "getLogs": {path: "/v1/sandboxes/SANDBOX/logs", status: 200},
		"execCommand": {path: "/v1/sandboxes/SANDBOX/exec", body: `{"args": ["true"]}`, status: 200}, "evalCode": {path: "/v1/sandboxes/SANDBOX/eval", body: `{"code": "1"}`, status: 200},
		"extendSandbox": {path: "/v1/sandboxes/SANDBOX/timeout", body: `{"timeout_secs": 0}`, status: 200}, "getSandboxStats": {path: "/v1/sandboxes/SANDBOX/stats", status: 200},
		"getNetwork": {path: "/v1/sandboxes/SANDBOX/network", status: 200}, "setNetwork": {path: "/v1/sandboxes/SANDBOX/network", body: `{"mode": "none"}`, status: 200},
		// The fake machines have no network: a port of a sandbox that may be asked for is a 503.
		"openTunnel":    {path: "/v1/sandboxes/SANDBOX/tunnel/80", status: 503, extra: map[string]string{"Connection": "Upgrade", "Upgrade": "forkd-tcp"}},
		"proxyPort":     {path: "/v1/sandboxes/SANDBOX/ports/80/", status: 503},
		"branchSandbox": {path: "/v1/sandboxes/SANDBOX/branch", body: `{"tag": "%s"}`, status: 201, fresh: tag}, "forkSandbox": {path: "/v1/sandboxes/SANDBOX/fork", status: 201},
		"suspendSandbox": {path: "/v1/sandboxes/%s/suspend", status: 200, fresh: sandbox},
		"resumeSandbox": {path: "/v1/sandboxes/%s/resume", status: 200, fresh: func(m *matrix) string {
			id := m.fork("acmetag", "")
			m.must(200, "run", "POST", "/v1/sandboxes/"+id+"/suspend", "")
			return id
		}},
		"listWorkspaces":  {path: "/v1/workspaces", status: 200},
		"createWorkspace": {path: "/v1/workspaces", body: `{"name": "%s", "snapshot_tag": "TAG"}`, status: 201, fresh: tag},
		"getWorkspace":    {path: "/v1/workspaces/WORK", status: 200}, "deleteWorkspace": {path: "/v1/workspaces/%s", status: 204, fresh: workspace},
		"suspendWorkspace": {path: "/v1/workspaces/%s/suspend", status: 200, fresh: workspace},
		"resumeWorkspace": {path: "/v1/workspaces/%s/resume", status: 200, fresh: func(m *matrix) string {
			name := workspace(m)
			m.must(200, "run", "POST", "/v1/workspaces/"+name+"/suspend", "")
			return name
		}},
	}
}

// name makes a name that nothing has.
func (m *matrix) name(prefix string) string {
	m.made++
	return fmt.Sprintf("%s%d", prefix, m.made)
}

// fork starts a sandbox of acme.
func (m *matrix) fork(tag, name string) string {
	m.t.Helper()
	var list []api.SandboxInfo
	body, err := json.Marshal(api.ForkRequest{SnapshotTag: tag, Name: name})
	if err != nil {
		m.t.Fatal(err)
	}
	m.decode(m.must(201, "run", "POST", "/v1/sandboxes", string(body)), &list)
	return list[0].ID
}

// newMatrix starts a daemon in which acme has an image "ours", a snapshot "acmetag", a sandbox and a workspace "acmework", and the default tenant an image
// and a snapshot "base".
func newMatrix(t *testing.T) *matrix {
	t.Helper()
	d := newLiveDaemon(t)
	plantKeys(t, d.dir+"/data")
	d.start("--listen", "127.0.0.1:0")
	m := &matrix{liveDaemon: d}
	m.must(201, "host-admin", "POST", "/v1/images", `{"name": "base", "kernel": "`+d.dir+`/vmlinuz", "rootfs": "`+d.dir+`/root.erofs", "python": true}`)
	m.must(201, "host-admin", "POST", "/v1/snapshots", `{"tag": "base", "image": "base", "mem_mib": 16}`)
	m.must(201, "host-admin", "POST", "/v1/images", `{"name": "ours", "kernel": "`+d.dir+`/vmlinuz", "rootfs": "`+d.dir+`/root.erofs", "python": true, "force": true}`)
	m.must(200, "host-admin", "PUT", "/v1/images/ours/sharing", `{"public": true}`)
	m.must(201, "run", "POST", "/v1/snapshots", `{"tag": "acmetag", "image": "ours", "mem_mib": 16}`)
	m.sandbox = m.fork("acmetag", "")
	m.workspace = m.fork("acmetag", "acmework")
	return m
}

// TestMatrix asks for every operation of openapi.yaml with every kind of credential: each gets the status that x-forkd-access says, another
// tenant what it would get if nothing of it existed, and every request its line in the audit record.
func TestMatrix(t *testing.T) {
	doc, err := openapi3.NewLoader().LoadFromData(api.Spec)
	if err != nil {
		t.Fatal(err)
	}
	m := newMatrix(t)
	todo := tries()
	for _, path := range slices.Sorted(maps.Keys(doc.Paths.Map())) {
		for method, op := range doc.Paths.Value(path).Operations() {
			x, ok := todo[op.OperationID]
			if !ok {
				t.Errorf("%s %s (%s) is not in the matrix: add it to tries", method, path, op.OperationID)
				continue
			}
			access, _ := op.Extensions["x-forkd-access"].(string)
			for _, c := range credentials {
				m.tryOne(method, path, op.OperationID, access, c.name, c.tenant, c.scope, c.expired || c.revoked, x)
			}
		}
	}
}

// tryOne makes one request of the matrix and looks at the answer and the record.
func (m *matrix) tryOne(method, route, op, access, cred, tenant, scope string, dead bool, x try) {
	what := op + " with " + cred
	may := access == "open" || !dead && scope != "" && covers(access, tenant, scope)
	known := !dead && scope != ""
	fresh := "nothing0"
	if x.fresh != nil && (may || strings.Contains(x.path, "%s")) {
		fresh = x.fresh(m)
	}
	real := strings.NewReplacer("SANDBOX", m.sandbox, "TAG", "acmetag", "WORK", "acmework", "%s", fresh)
	path, body := real.Replace(x.path), real.Replace(x.body)
	got := m.request(cred, method, path, body, x.extra)
	want := x.status
	switch {
	case access == "open":
	case !known:
		want = 401
	case !may:
		want = 403
	case tenant != "acme" && !(x.host && tenant == "default"):
		want = m.strangerStatus(what, method, cred, fresh, got, x)
	}
	if got.status != want {
		m.t.Errorf("%s: %s %s = %d %s, want %d", what, method, path, got.status, got.body, want)
	}
	if tenant != "acme" || !known {
		for _, secret := range []string{m.sandbox, m.workspace, "acme"} {
			if strings.Contains(string(got.body), secret) && !strings.Contains(path+body, secret) && !(op == "listKeys" && tenant == "default") && !(cred == "expired" || cred == "revoked") {
				m.t.Errorf("%s: %s %s tells of %s: %s", what, method, path, secret, got.body)
			}
		}
	}
	m.checkRecorded(what, method, route, cred, tenant, known, got)
}

// strangerStatus is what somebody of another tenant is to get: the same as for something that does not exist, word for word but for its name.
func (m *matrix) strangerStatus(what, method, cred, fresh string, got answered, x try) int {
	names := map[string]string{"SANDBOX": "sb00000000", "TAG": "nosuchtag", "WORK": "nosuchwork"}
	if strings.Contains(x.path, "%s") { // else it is the name of what is to be made
		names["%s"] = "nosuch0"
	}
	path, body := x.path, x.body
	for placeholder, name := range names {
		path, body = strings.ReplaceAll(path, placeholder, name), strings.ReplaceAll(body, placeholder, name)
	}
	if path == x.path && strings.ReplaceAll(body, "%s", "") == strings.ReplaceAll(x.body, "%s", "") {
		return x.status // it is about nothing of anybody
	}
	none := m.request(cred, method, path, strings.ReplaceAll(body, "%s", fresh), x.extra)
	plain := func(a answered) string {
		return strings.NewReplacer(m.sandbox, "X", "acmetag", "X", "acmework", "X", fresh, "X", "sb00000000", "X", "nosuchtag", "X", "nosuchwork", "X", "nosuch0", "X",
			a.id, "ID").Replace(string(a.body))
	}
	if none.status != got.status || plain(got) != plain(none) || got.status != 404 {
		m.t.Errorf("%s: what is another tenant's = %d %s, what does not exist = %d %s", what, got.status, got.body, none.status, none.body)
	}
	return 404
}

// checkRecorded looks for the line of a request in the audit record.
func (m *matrix) checkRecorded(what, method, route, cred, tenant string, known bool, got answered) {
	if route == "/healthz" {
		return // left out when it went well, as documented
	}
	line := m.auditLine(got.id)
	principal := "key " + idOf(cred) + " (" + cred + ")"
	if cred == "none" || cred == "wrong" {
		principal = "nobody"
	}
	action := method + " " + route
	if !known { // refused before it came to a route
		action = method + " " + got.path
	}
	if line.Principal != principal || line.Tenant != tenant || line.Status != got.status || line.Action != action || line.Remote == "" {
		m.t.Errorf("%s: the audit line of %s is %+v, want principal %q, tenant %q, status %d, action %q", what, got.id, line, principal, tenant, got.status, action)
	}
	if bytes.Contains([]byte(line.Outcome), []byte("fk_")) {
		m.t.Errorf("%s: a key is in the record: %+v", what, line)
	}
}
