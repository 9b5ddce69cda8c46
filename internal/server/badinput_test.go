package server

import (
	"bytes"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/forkd/forkd/api"
)

// TestBadInput holds that every bad request is a 4xx with the right code, a JSON body, and nothing done.
func TestBadInput(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("a", 65)
	tests := []struct {
		name         string
		method, path string
		body         string
		headers      []string
		status       int
		code         string
		says         string // part of the message
	}{
		{"no such route", "GET", "/v2/snapshots", "", nil, 404, "not_found", "/v2/snapshots"},
		{"root", "GET", "/", "", nil, 404, "not_found", ""},
		{"wrong method", "PATCH", "/v1/snapshots", "", nil, 405, "method_not_allowed", "PATCH"},
		{"wrong method below", "GET", "/v1/sandboxes/sb1/exec", "", nil, 405, "method_not_allowed", "GET"},
		{"trailing slash", "GET", "/v1/snapshots/", "", nil, 400, "invalid_argument", "path"},
		{"dots in the path", "DELETE", "/v1/snapshots/..", "", nil, 400, "invalid_argument", ".."},
		{"escaped dots", "DELETE", "/v1/snapshots/%2e%2e", "", nil, 400, "invalid_tag", ".."},
		{"escaped slash", "GET", "/v1/snapshots/a%2Fb/info", "", nil, 400, "invalid_tag", "a/b"},
		{"tag of 65", "GET", "/v1/snapshots/" + long + "/info", "", nil, 400, "invalid_tag", long},
		{"tag with a space", "GET", "/v1/snapshots/a%20b/info", "", nil, 400, "invalid_tag", ""},
		{"id with capitals", "GET", "/v1/sandboxes/SB", "", nil, 400, "invalid_argument", "SB"},
		{"id with a slash", "POST", "/v1/sandboxes/a%2Fb/ping", "", nil, 400, "invalid_argument", "a/b"},
		{"image name", "DELETE", "/v1/images/a.b", "", nil, 400, "invalid_argument", "a.b"},

		{"no body", "POST", "/v1/sandboxes", "", nil, 400, "invalid_argument", "empty"},
		{"white space", "POST", "/v1/sandboxes", " \n", nil, 400, "invalid_argument", "empty"},
		{"not JSON", "POST", "/v1/sandboxes", "{snapshot_tag: 1}", nil, 400, "invalid_argument", "not JSON"},
		{"cut JSON", "POST", "/v1/sandboxes", `{"snapshot_tag": "py"`, nil, 400, "invalid_argument", "ends in the middle"},
		{"an array", "POST", "/v1/sandboxes", `[]`, nil, 400, "invalid_argument", "array"},
		{"null", "POST", "/v1/sandboxes", `null`, nil, 400, "invalid_argument", "not a JSON object"},
		{"a string", "POST", "/v1/sandboxes", `"py"`, nil, 400, "invalid_argument", "string"},
		{"trailing garbage", "POST", "/v1/sandboxes", `{"snapshot_tag": "py"} x`, nil, 400, "invalid_argument", "after the JSON object"},
		{"two objects", "POST", "/v1/sandboxes", `{"snapshot_tag": "py"}{}`, nil, 400, "invalid_argument", "after the JSON object"},
		{"not UTF-8", "POST", "/v1/sandboxes", "{\"snapshot_tag\": \"\xff\"}", nil, 400, "invalid_argument", "UTF-8"},
		{"another content", "POST", "/v1/sandboxes", `<a/>`, []string{"Content-Type", "text/xml"}, 400, "invalid_argument", "text/xml"},
		{"unknown field", "POST", "/v1/sandboxes", `{"snapshot_tag": "py", "count": 3}`, nil, 400, "invalid_argument", `"count"`},
		{"wrong type", "POST", "/v1/sandboxes", `{"snapshot_tag": "py", "n": "3"}`, nil, 400, "invalid_argument", `"n"`},
		{"a fraction", "POST", "/v1/sandboxes", `{"snapshot_tag": "py", "n": 1.5}`, nil, 400, "invalid_argument", `"n"`},
		{"no tag", "POST", "/v1/sandboxes", `{"n": 1}`, nil, 400, "invalid_argument", "snapshot_tag"},
		{"null tag", "POST", "/v1/sandboxes", `{"snapshot_tag": null}`, nil, 400, "invalid_argument", "snapshot_tag"},
		{"tag with a slash", "POST", "/v1/sandboxes", `{"snapshot_tag": "a/b"}`, nil, 400, "invalid_tag", "a/b"},
		{"tag with dots", "POST", "/v1/sandboxes", `{"snapshot_tag": ".."}`, nil, 400, "invalid_tag", ".."},
		{"tag of 65 in a body", "POST", "/v1/sandboxes", `{"snapshot_tag": "` + long + `"}`, nil, 400, "invalid_tag", ""},
		{"n of 0", "POST", "/v1/sandboxes", `{"snapshot_tag": "py", "n": 0}`, nil, 400, "invalid_argument", "from 1 to 1000"},
		{"n of -1", "POST", "/v1/sandboxes", `{"snapshot_tag": "py", "n": -1}`, nil, 400, "invalid_argument", "from 1 to 1000"},
		{"n of 1001", "POST", "/v1/sandboxes", `{"snapshot_tag": "py", "n": 1001}`, nil, 400, "invalid_argument", "from 1 to 1000"},
		{"n beyond integers", "POST", "/v1/sandboxes", `{"snapshot_tag": "py", "n": 99999999999999999999}`, nil, 400, "invalid_argument", `"n"`},
		{"negative timeout", "POST", "/v1/sandboxes", `{"snapshot_tag": "py", "timeout_secs": -1}`, nil, 400, "invalid_argument", "timeout_secs"},
		{"huge timeout", "POST", "/v1/sandboxes", `{"snapshot_tag": "py", "timeout_secs": 1e300}`, nil, 400, "invalid_argument", "timeout_secs"},
		{"negative limit", "POST", "/v1/sandboxes", `{"snapshot_tag": "py", "memory_limit_mib": -5}`, nil, 400, "invalid_argument", "memory_limit_mib"},
		{"path", "POST", "/v1/sandboxes", `{"snapshot_tag": "py", "path": "warm"}`, nil, 400, "invalid_argument", "warm"},
		{"environment name", "POST", "/v1/sandboxes", `{"snapshot_tag": "py", "env": {"A=B": "c"}}`, nil, 400, "invalid_argument", "A=B"},
		{"long idempotency key", "POST", "/v1/sandboxes", `{"snapshot_tag": "py"}`, []string{"Idempotency-Key", strings.Repeat("k", 300)}, 400, "invalid_argument", "300"},

		{"snapshot without image", "POST", "/v1/snapshots", `{"tag": "t"}`, nil, 400, "invalid_argument", "image"},
		{"snapshot without tag", "POST", "/v1/snapshots", `{"image": "py"}`, nil, 400, "invalid_argument", "tag"},
		{"snapshot with a bad tag", "POST", "/v1/snapshots", `{"tag": "a.b", "image": "py"}`, nil, 400, "invalid_tag", "a.b"},
		{"a root file system of nobody", "POST", "/v1/snapshots", `{"tag": "t", "kernel": "/k", "rootfs": "/etc/passwd"}`, nil, 400, "invalid_argument", "/etc/passwd"},
		{"a tap", "POST", "/v1/snapshots", `{"tag": "t", "image": "py", "tap": "tap0"}`, nil, 400, "invalid_argument", "tap0"},
		{"warm-up of no kind", "POST", "/v1/snapshots", `{"tag": "t", "image": "py", "warm_up": [{"kind": "run", "code": "x"}]}`, nil, 400, "invalid_argument", "warm_up 0"},
		{"warm-up with an unknown field", "POST", "/v1/snapshots", `{"tag": "t", "image": "py", "warm_up": [{"cmd": "x"}]}`, nil, 400, "invalid_argument", `"cmd"`},
		{"negative memory", "POST", "/v1/snapshots", `{"tag": "t", "image": "py", "mem_mib": -1}`, nil, 400, "invalid_argument", "mem_mib"},
		{"cascade and force", "DELETE", "/v1/snapshots/py?cascade&force", "", nil, 400, "invalid_argument", "exclude"},
		{"cascade of maybe", "DELETE", "/v1/snapshots/py?cascade=maybe", "", nil, 400, "invalid_argument", "maybe"},
		{"pool without size", "PUT", "/v1/snapshots/py/pool", `{}`, nil, 400, "invalid_argument", "size"},
		{"negative pool", "PUT", "/v1/snapshots/py/pool", `{"size": -1}`, nil, 400, "invalid_argument", "size"},

		{"exec without args", "POST", "/v1/sandboxes/sb1/exec", `{}`, nil, 400, "invalid_argument", "args"},
		{"exec with no args", "POST", "/v1/sandboxes/sb1/exec", `{"args": []}`, nil, 400, "invalid_argument", "args"},
		{"exec of a string", "POST", "/v1/sandboxes/sb1/exec", `{"args": "ls"}`, nil, 400, "invalid_argument", "array"},
		{"exec with NUL", "POST", "/v1/sandboxes/sb1/exec", `{"args": ["a\u0000b"]}`, nil, 400, "invalid_argument", "NUL"},
		{"exec stdin not base64", "POST", "/v1/sandboxes/sb1/exec", `{"args": ["a"], "encoding": "base64", "stdin": "%%"}`, nil, 400, "invalid_argument", "stdin"},
		{"exec encoding", "POST", "/v1/sandboxes/sb1/exec", `{"args": ["a"], "encoding": "hex"}`, nil, 400, "invalid_argument", "hex"},
		{"exec output", "POST", "/v1/sandboxes/sb1/exec", `{"args": ["a"], "max_output_bytes": 99999999}`, nil, 400, "invalid_argument", "max_output_bytes"},
		{"eval without code", "POST", "/v1/sandboxes/sb1/eval", `{}`, nil, 400, "invalid_argument", "code"},
		{"extend without timeout", "POST", "/v1/sandboxes/sb1/timeout", `{}`, nil, 400, "invalid_argument", "timeout_secs"},
		{"image without name", "POST", "/v1/images", `{"packages": []}`, nil, 400, "invalid_argument", "name"},
		{"image with a bad name", "POST", "/v1/images", `{"name": "a b"}`, nil, 400, "invalid_argument", "a b"},
		{"workspace in a fork of two", "POST", "/v1/sandboxes", `{"snapshot_tag": "py", "n": 2, "name": "w"}`, nil, 400, "invalid_argument", `"w"`},
		{"bad name of a sandbox", "POST", "/v1/sandboxes", `{"snapshot_tag": "py", "name": "a/b"}`, nil, 400, "invalid_argument", "a/b"},
		{"negative idle time", "POST", "/v1/sandboxes", `{"snapshot_tag": "py", "auto_suspend_secs": -1}`, nil, 400, "invalid_argument", "auto_suspend_secs"},

		{"branch with mode and diff", "POST", "/v1/sandboxes/sb1/branch", `{"mode": "live", "diff": true}`, nil, 400, "invalid_argument", "exclude"},
		{"branch with mode and live", "POST", "/v1/sandboxes/sb1/branch", `{"mode": "full", "live": true}`, nil, 400, "invalid_argument", "exclude"},
		{"branch with diff and live", "POST", "/v1/sandboxes/sb1/branch", `{"diff": true, "live": true}`, nil, 400, "invalid_argument", "exclude"},
		{"branch with diff and measure_diff", "POST", "/v1/sandboxes/sb1/branch", `{"diff": true, "measure_diff": true}`, nil, 400, "invalid_argument", "exclude"},
		{"branch with mode diff and measure_diff", "POST", "/v1/sandboxes/sb1/branch", `{"mode": "diff", "measure_diff": true}`, nil, 400, "invalid_argument", "exclude"},
		{"branch of no mode", "POST", "/v1/sandboxes/sb1/branch", `{"mode": "cow"}`, nil, 400, "invalid_argument", "cow"},
		{"branch to a bad tag", "POST", "/v1/sandboxes/sb1/branch", `{"tag": "a.b"}`, nil, 400, "invalid_tag", "a.b"},
		{"branch from another parent", "POST", "/v1/sandboxes/sb1/branch", `{"mode": "diff", "parent_tag": "other"}`, nil, 400, "invalid_argument", "other"},
		{"branch from a bad parent", "POST", "/v1/sandboxes/sb1/branch", `{"mode": "diff", "parent_tag": "a.b"}`, nil, 400, "invalid_tag", "a.b"},
		{"full branch with a parent", "POST", "/v1/sandboxes/sb1/branch", `{"mode": "full", "parent_tag": "py"}`, nil, 400, "invalid_argument", "full"},
		{"branch with an unknown field", "POST", "/v1/sandboxes/sb1/branch", `{"name": "b"}`, nil, 400, "invalid_argument", `"name"`},
		{"fork of a running one of none", "POST", "/v1/sandboxes/sb1/fork", `{"n": 0}`, nil, 400, "invalid_argument", `"n"`},
		{"fork of a running one to a bad tag", "POST", "/v1/sandboxes/sb1/fork", `{"tag": ".."}`, nil, 400, "invalid_tag", ".."},
		{"fork of a running one with bad env", "POST", "/v1/sandboxes/sb1/fork", `{"env": {"A=B": "1"}}`, nil, 400, "invalid_argument", "A=B"},
		{"suspend of no id", "POST", "/v1/sandboxes/SB/suspend", "", nil, 400, "invalid_argument", "SB"},
		{"diff without steps", "POST", "/v1/snapshots/py/diff", `{"tag": "b"}`, nil, 400, "invalid_argument", "steps"},
		{"diff with no steps", "POST", "/v1/snapshots/py/diff", `{"tag": "b", "steps": []}`, nil, 400, "invalid_argument", "steps"},
		{"diff without tag", "POST", "/v1/snapshots/py/diff", `{"steps": [{"kind": "exec", "code": "true"}]}`, nil, 400, "invalid_argument", "tag"},
		{"diff with an empty step", "POST", "/v1/snapshots/py/diff", `{"tag": "b", "steps": [{"kind": "exec", "code": ""}]}`, nil, 400, "invalid_argument", "step 0"},
		{"compact to nothing", "POST", "/v1/snapshots/py/compact", `{}`, nil, 400, "invalid_argument", "to"},
		{"compact to a bad tag", "POST", "/v1/snapshots/py/compact", `{"to": "a b"}`, nil, 400, "invalid_tag", "a b"},
		{"workspace without a name", "POST", "/v1/workspaces", `{"snapshot_tag": "py"}`, nil, 400, "invalid_argument", "name"},
		{"workspace with a bad name", "POST", "/v1/workspaces", `{"name": "a/b", "snapshot_tag": "py"}`, nil, 400, "invalid_argument", "a/b"},
		{"workspace of a bad tag", "POST", "/v1/workspaces", `{"name": "w", "snapshot_tag": "a/b"}`, nil, 400, "invalid_tag", "a/b"},
		{"bad name of a workspace", "GET", "/v1/workspaces/a.b", "", nil, 400, "invalid_argument", "a.b"},
		{"no such workspace", "GET", "/v1/workspaces/none", "", nil, 404, "sandbox_not_found", "none"},
		{"suspend of no such workspace", "POST", "/v1/workspaces/none/suspend", "", nil, 404, "sandbox_not_found", "none"},
		{"pack with a bad signature", "GET", "/v1/snapshots/py/pack", "", []string{"Forkd-Signature", "%%"}, 400, "invalid_argument", "Forkd-Signature"},
		{"unpack of JSON", "POST", "/v1/snapshots/unpack?tag=t", "{}", nil, 400, "invalid_argument", "application/json"},
		{"unpack of a form", "POST", "/v1/snapshots/unpack?tag=t", "--x", []string{"Content-Type", "multipart/form-data; boundary=x"}, 400, "invalid_argument", "multipart"},
		{"unpack to a bad tag", "POST", "/v1/snapshots/unpack?tag=a.b", "x", []string{"Content-Type", octets}, 400, "invalid_tag", "a.b"},
		{"unpack to no tag", "POST", "/v1/snapshots/unpack?tag=", "x", []string{"Content-Type", octets}, 400, "invalid_tag", ""},
		{"unpack with a bad key", "POST", "/v1/snapshots/unpack?tag=t", "x", []string{"Content-Type", octets, "Forkd-Require-Signer", "AAAA"}, 400, "invalid_argument", "AAAA"},
		{"list of maybe", "GET", "/v1/sandboxes?all=maybe", "", nil, 400, "invalid_argument", "maybe"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			got := f.do(t, tt.method, tt.path, tt.body, tt.headers...)
			if got.status != tt.status || got.code() != tt.code {
				t.Errorf("%s %s = %d %q, want %d %q\n%s", tt.method, tt.path, got.status, got.code(), tt.status, tt.code, got.body)
			}
			var e api.Error
			if err := json.Unmarshal([]byte(got.body), &e); err != nil {
				t.Fatalf("body is not JSON: %v\n%s", err, got.body)
			}
			if !strings.Contains(e.Error, tt.says) {
				t.Errorf("message = %q, want it to name %q", e.Error, tt.says)
			}
			if e.RequestID == "" || e.RequestID != got.header.Get("X-Request-Id") {
				t.Errorf("request_id = %q, want the header's %q", e.RequestID, got.header.Get("X-Request-Id"))
			}
			if n := len(f.forks) + len(f.snaps) + len(f.execs) + len(f.evals) + len(f.builds) + len(f.killed) + len(f.deleted) + len(f.branches) + len(f.runningForks) +
				len(f.diffs) + len(f.compacted) + len(f.moved) + len(f.signatures) + len(f.unpacks); n != 0 {
				t.Errorf("the domain was called %d times, want none", n)
			}
		})
	}
}

func TestMethodNotAllowedNamesMethods(t *testing.T) {
	t.Parallel()
	got := newFixture(t).do(t, "PUT", "/v1/snapshots", "")
	if allow := got.header.Get("Allow"); allow != "GET, POST" {
		t.Errorf("Allow = %q, want GET, POST", allow)
	}
}

// TestBodyTooLarge holds that a client that sends everything before it reads sees the 413, whatever it sends.
func TestBodyTooLarge(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name, path string
		size       int
		status     int
	}{
		{"fork of 100 MiB", "/v1/sandboxes", 100 << 20, 413},
		{"fork just over", "/v1/sandboxes", maxBody + 1, 413},
		{"exec over", "/v1/sandboxes/sb1/exec", maxCodeBody + 1, 413},
		{"exec of what a fork may not", "/v1/sandboxes/sb1/exec", maxBody + 1, 400},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			// net/http's client reads while it writes; this one doesn't.
			conn, err := net.Dial("tcp", f.http.Listener.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			req, _ := http.NewRequest("POST", f.http.URL+tt.path, io.LimitReader(repeat('x'), int64(tt.size)))
			req.ContentLength = int64(tt.size)
			if err := req.Write(conn); err != nil {
				t.Fatalf("send the whole body: %v", err)
			}
			got := readAnswer(t, conn, req)
			if got.status != tt.status {
				t.Errorf("status = %d, want %d\n%s", got.status, tt.status, got.body)
			}
			if tt.status == 413 && got.code() != "body_too_large" {
				t.Errorf("code = %q, want body_too_large", got.code())
			}
		})
	}
}

// repeat is an endless reader of one byte.
type repeat byte

func (b repeat) Read(p []byte) (int, error) {
	copy(p, bytes.Repeat([]byte{byte(b)}, len(p)))
	return len(p), nil
}

// TestBodyTooLargeIsNotAskedFor holds that a client that asks first is refused before it sends.
func TestBodyTooLargeIsNotAskedFor(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	conn, err := net.Dial("tcp", f.http.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "POST /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\nContent-Length: 104857600\r\nExpect: 100-continue\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if got := readAnswer(t, conn, nil); got.status != 413 {
		t.Errorf("= %d, want 413 and no 100", got.status)
	}
}
