package e2e

import (
	"io"
	"strings"
	"testing"

	"github.com/forkd/forkd/client"
)

// zeros is an endless reader.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// TestBadRequests sends what nobody should. Each is refused with a 4xx and its reason, and changes nothing.
func TestBadRequests(t *testing.T) {
	d := sharedDaemon(t)
	g := d.fork1()
	long := strings.Repeat("a", 65)
	box := "/v1/sandboxes/" + g.ID
	tests := []struct {
		name, method, path, body string
		want                     refusal
	}{
		{"unknown tag", "POST", "/v1/sandboxes", `{"snapshot_tag": "nosuch"}`, refusal{404, "snapshot_not_found", "nosuch"}},
		{"tag with a slash", "POST", "/v1/sandboxes", `{"snapshot_tag": "a/b"}`, refusal{400, "invalid_tag", "a/b"}},
		{"tag of dots", "POST", "/v1/sandboxes", `{"snapshot_tag": ".."}`, refusal{400, "invalid_tag", ".."}},
		{"tag of 65", "POST", "/v1/sandboxes", `{"snapshot_tag": "` + long + `"}`, refusal{400, "invalid_tag", "aaa"}},
		{"empty tag", "POST", "/v1/sandboxes", `{"snapshot_tag": ""}`, refusal{400, "invalid_tag", ""}},
		{"path with a slash", "GET", "/v1/snapshots/a%2Fb/info", "", refusal{400, "invalid_tag", "a/b"}},
		{"path with dots", "DELETE", "/v1/snapshots/%2e%2e", "", refusal{400, "invalid_tag", ".."}},
		{"path with 65", "DELETE", "/v1/snapshots/" + long, "", refusal{400, "invalid_tag", "aaa"}},
		{"n of 0", "POST", "/v1/sandboxes", `{"snapshot_tag": "py", "n": 0}`, refusal{400, "invalid_argument", "1 to 1000"}},
		{"n of -1", "POST", "/v1/sandboxes", `{"snapshot_tag": "py", "n": -1}`, refusal{400, "invalid_argument", "1 to 1000"}},
		{"n of 1001", "POST", "/v1/sandboxes", `{"snapshot_tag": "py", "n": 1001}`, refusal{400, "invalid_argument", "1 to 1000"}},
		{"n of a half", "POST", "/v1/sandboxes", `{"snapshot_tag": "py", "n": 0.5}`, refusal{400, "invalid_argument", "integer"}},
		{"not JSON", "POST", "/v1/sandboxes", `snapshot_tag=py`, refusal{400, "invalid_argument", "not JSON"}},
		{"cut JSON", "POST", "/v1/sandboxes", `{"snapshot_tag": "py`, refusal{400, "invalid_argument", "not JSON"}},
		{"more than JSON", "POST", "/v1/sandboxes", `{"snapshot_tag": "py"} {}`, refusal{400, "invalid_argument", "after"}},
		{"nothing", "POST", "/v1/sandboxes", ``, refusal{400, "invalid_argument", "empty"}},
		{"unknown field", "POST", "/v1/sandboxes", `{"snapshot_tag": "py", "count": 2}`, refusal{400, "invalid_argument", "count"}},
		{"memory limit that can't be kept", "POST", "/v1/sandboxes", `{"snapshot_tag": "py", "memory_limit_mib": 16}`, refusal{400, "invalid_argument", "16 MiB"}},
		{"pool that is empty", "POST", "/v1/sandboxes", `{"snapshot_tag": "py", "path": "pool"}`, refusal{503, "queue_full", "py"}},
		{"metadata too large", "POST", "/v1/sandboxes", `{"snapshot_tag": "py", "metadata": {"a": "` + strings.Repeat("x", 20<<10) + `"}}`, refusal{400, "invalid_argument", "metadata"}},

		{"exec without args", "POST", box + "/exec", `{}`, refusal{400, "invalid_argument", "args"}},
		{"exec with no args", "POST", box + "/exec", `{"args": []}`, refusal{400, "invalid_argument", "args"}},
		{"exec of nothing", "POST", box + "/exec", `{"args": [""]}`, refusal{400, "invalid_argument", "args"}},
		{"exec as nobody there is", "POST", box + "/exec", `{"args": ["true"], "user": "nosuch"}`, refusal{400, "invalid_argument", "nosuch"}},
		{"exec nowhere", "POST", box + "/exec", `{"args": ["true"], "cwd": "/nosuch"}`, refusal{400, "invalid_argument", "/nosuch"}},
		{"exec with too long arguments", "POST", box + "/exec", `{"args": ["true", "` + strings.Repeat("x", 3<<20) + `"]}`, refusal{400, "invalid_argument", "too long"}},
		{"exec with a negative timeout", "POST", box + "/exec", `{"args": ["true"], "timeout_secs": -1}`, refusal{400, "invalid_argument", "timeout_secs"}},
		{"eval without code", "POST", box + "/eval", `{}`, refusal{400, "invalid_argument", "code"}},
		{"unknown sandbox", "POST", "/v1/sandboxes/sb0/exec", `{"args": ["true"]}`, refusal{404, "sandbox_not_found", "sb0"}},
		{"id with dots", "GET", "/v1/sandboxes/%2e%2e", "", refusal{400, "invalid_argument", ".."}},
		{"extension into the past", "POST", box + "/timeout", `{"timeout_secs": -5}`, refusal{400, "invalid_argument", "timeout_secs"}},
		{"kill of the unknown", "DELETE", "/v1/sandboxes/sb0", "", refusal{404, "sandbox_not_found", "sb0"}},

		{"snapshot of no image", "POST", "/v1/snapshots", `{"tag": "t"}`, refusal{400, "invalid_argument", "image"}},
		{"snapshot of an unknown image", "POST", "/v1/snapshots", `{"tag": "t", "image": "nosuch"}`, refusal{404, "image_not_found", "nosuch"}},
		{"snapshot that exists", "POST", "/v1/snapshots", `{"tag": "py", "image": "bare"}`, refusal{409, "snapshot_exists", "py"}},
		{"snapshot with too little memory", "POST", "/v1/snapshots", `{"tag": "t", "image": "bare", "mem_mib": 8}`, refusal{400, "invalid_argument", "8 MiB"}},
		{"snapshot with too much memory", "POST", "/v1/snapshots", `{"tag": "t", "image": "bare", "mem_mib": 1000000}`, refusal{400, "invalid_argument", "1000000 MiB"}},
		{"snapshot with too many vCPUs", "POST", "/v1/snapshots", `{"tag": "t", "image": "bare", "vcpus": 1000}`, refusal{400, "invalid_argument", "1000 vCPUs"}},
		{"pool of the unknown", "PUT", "/v1/snapshots/nosuch/pool", `{"size": 1}`, refusal{404, "snapshot_not_found", "nosuch"}},
		{"pool of -1", "PUT", "/v1/snapshots/py/pool", `{"size": -1}`, refusal{400, "invalid_argument", "size"}},
		{"pool of 1001", "PUT", "/v1/snapshots/py/pool", `{"size": 1001}`, refusal{400, "invalid_argument", "size"}},
		{"removal of a snapshot in use", "DELETE", "/v1/snapshots/py", "", refusal{409, "snapshot_in_use", g.ID}},
		{"removal of an image in use", "DELETE", "/v1/images/python", "", refusal{409, "image_in_use", "py"}},
		{"image of a bad name", "POST", "/v1/images", `{"name": "../x"}`, refusal{400, "invalid_argument", "../x"}},
		{"image of a bad package", "POST", "/v1/images", `{"name": "x", "packages": ["; reboot"]}`, refusal{400, "invalid_argument", "; reboot"}},
		{"image of no root", "POST", "/v1/images", `{"name": "x", "rootfs": "/nosuch"}`, refusal{400, "invalid_argument", "/nosuch"}},
		{"no such route", "GET", "/v2", "", refusal{404, "not_found", "/v2"}},
		{"no such method", "PATCH", "/v1/sandboxes", "", refusal{405, "method_not_allowed", "PATCH"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d.in(t).refuses(tt.method, tt.path, strings.NewReader(tt.body), tt.want)
		})
	}
	t.Run("a body of 100 MiB", func(t *testing.T) {
		for _, path := range []string{"/v1/sandboxes", box + "/exec"} {
			d.in(t).refuses("POST", path, io.LimitReader(zeros{}, 100<<20), refusal{413, "body_too_large", path})
		}
	})
	d.checkSandboxes(g)
	if got := g.py("6 * 7"); got != "42" {
		t.Errorf("6 * 7 after all that: %s", got)
	}
}

// TestBadCommandLines: the same through the command line, which says what is wrong, and what to do.
func TestBadCommandLines(t *testing.T) {
	d := sharedDaemon(t)
	g := d.fork1()
	tests := []struct {
		name string
		args []string
		code int
		says string
	}{
		{"unknown tag", []string{"fork", "--tag", "nosuch"}, 1, "`forkd images` lists the snapshots"},
		{"tag with a slash", []string{"fork", "--tag", "a/b"}, 1, "A-Z a-z 0-9 _ and -"},
		{"tag of dots", []string{"rmi", ".."}, 1, ".."},
		{"tag of 65", []string{"fork", "--tag", strings.Repeat("a", 65)}, 1, "1 to 64"},
		{"n of 0", []string{"fork", "--tag", pyTag, "-n", "0"}, 2, "from 1 to 1000"},
		{"n of -1", []string{"fork", "--tag", pyTag, "-n", "-1"}, 2, "--n"},
		{"n of -1, given otherwise", []string{"fork", "--tag", pyTag, "--n=-1"}, 2, "from 1 to 1000"},
		{"n of 1001", []string{"fork", "--tag", pyTag, "-n", "1001"}, 2, "from 1 to 1000"},
		{"unknown image", []string{"snapshot", "--tag", "t", "--image", "nosuch"}, 1, "`forkd image ls`"},
		{"snapshot that exists", []string{"snapshot", "--tag", pyTag, "--image", bareImage}, 1, "exists"},
		{"exec of nothing", []string{"exec", g.ID}, 2, "command"},
		{"exec in the unknown", []string{"exec", "sb0", "--", "true"}, 1, "`forkd ls`"},
		{"exec as nobody there is", []string{"exec", "-u", "nosuch", g.ID, "--", "true"}, 1, "nosuch"},
		{"exec of an unknown command", []string{"exec", g.ID, "--", "nosuch"}, 127, "no such command"},
		{"exec that takes too long", []string{"exec", "--timeout", "1s", g.ID, "--", "sleep", "600"}, 124, "killed after 1s"},
		{"eval that fails", []string{"eval", g.ID, "1 / 0"}, 1, "ZeroDivisionError"},
		{"kill of the unknown", []string{"kill", "sb0"}, 1, "sb0"},
		{"removal of a snapshot in use", []string{"rmi", pyTag}, 1, "--force"},
		{"removal of an image in use", []string{"image", "rm", pythonImage}, 1, "forkd rmi"},
		{"logs of the unknown", []string{"logs", "sb0"}, 1, "sb0"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := d.in(t).forkd(tt.args...)
			if got.code != tt.code || !strings.Contains(got.stderr, tt.says) || strings.Contains(got.stderr, "goroutine ") {
				t.Errorf("got %v\nwant exit code %d and %q", got, tt.code, tt.says)
			}
		})
	}
	d.checkSandboxes(g)
}

// TestNoInterpreter: an image without python runs commands; asked to evaluate it says what it lacks.
func TestNoInterpreter(t *testing.T) {
	t.Parallel()
	d := ownDaemon(t, setup{})
	snap := d.snapshot(client.SnapshotRequest{Tag: "nopy"})
	if snap.Python {
		t.Error("the snapshot of an image without python says that it has an interpreter")
	}
	g := d.fork1(of("nopy"))
	if got := g.sh("echo $((6 * 7))"); got != "42" {
		t.Errorf("6 * 7: %s", got)
	}
	_, err := g.eval(client.EvalRequest{Code: "6 * 7"})
	wantError(t, "eval", err, 422, "no_interpreter", g.ID, "python3")
	d.refuses("POST", "/v1/snapshots", strings.NewReader(`{"tag": "evaluated", "image": "bare", "mem_mib": 128, "warm_up": [{"kind": "eval", "code": "1"}]}`),
		refusal{422, "no_interpreter", "bare"})
	d.fillPool("nopy", 1)
	if got := d.fork1(of("nopy"), fromPool).sh("echo claimed"); got != "claimed" {
		t.Errorf("a claimed child without python printed %q", got)
	}
	d.fillPool("nopy", 0)
	if got := d.must("images", "-q"); got != "nopy\n"+pyTag {
		t.Errorf("snapshots: %q", got)
	}
	d.checkTidy()
}
