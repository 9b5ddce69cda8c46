package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/getkin/kin-openapi/openapi3"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/internal/audit"
)

// payloads are what an attacker with a valid key writes wherever a word is expected.
var payloads = []string{
	"../../../../etc/passwd", "/etc/passwd", "..", ".", "~root", "a/../../b", `..\..\etc\passwd`, "%2e%2e%2fetc%2fpasswd", "a\x00b", "file:///etc/passwd",
	"$(touch pwned)", "`touch pwned`", "; touch pwned #", "' OR '1'='1", "rival/acmetag", "default/base", "*", "-o=ProxyCommand=x", "--help",
	"a\r\nX-Injected: 1", "line\nbreak", "\x1b[2J\x1b]0;pwned\x07", "\u202egnp.exe", "{{7*7}}", "%s%n%d", strings.Repeat("A", 70_000), "\xff\xfe", "",
}

// TestAttacksByStrings writes each payload into every string that a key of scope run can send, in paths and bodies, wherever openapi.yaml has one.
// Nothing breaks, nothing is read or written that should not be, and every request has a line in the record that holds.
func TestAttacksByStrings(t *testing.T) {
	m := newMatrix(t)
	doc, err := openapi3.NewLoader().LoadFromData(api.Spec)
	if err != nil {
		t.Fatal(err)
	}
	before := m.tree()
	todo := tries()
	sent := 0
	for _, path := range slices.Sorted(maps.Keys(doc.Paths.Map())) {
		for method, op := range doc.Paths.Value(path).Operations() {
			access := op.Extensions["x-forkd-access"]
			if (access != "read" && access != "run") || op.OperationID == "getEvents" {
				continue
			}
			x := todo[op.OperationID]
			for _, payload := range payloads {
				for _, attack := range attacksOn(path, x, op, payload) {
					sent++
					m.strike(method, attack.path, attack.body)
				}
			}
		}
	}
	if sent < 500 {
		t.Errorf("%d attacks were made: is there nothing to attack?", sent)
	}
	m.must(200, "run", "GET", "/v1/sandboxes/"+m.sandbox, "")
	for name := range m.tree() {
		if !before[name] {
			t.Errorf("%s was not there before", name)
		}
	}
	m.checkLogAndRecord()
}

type attack struct{ path, body string }

// attacksOn puts a payload into each parameter of the path, and into each string of the body, of a request that is good otherwise.
func attacksOn(path string, x try, op *openapi3.Operation, payload string) []attack {
	good := strings.NewReplacer("SANDBOX", "sb0", "TAG", "acmetag", "WORK", "acmework", "%s", "nothing0")
	var all []attack
	if i, j := strings.Index(path, "{"), strings.Index(path, "}"); i >= 0 && payload != "" {
		all = append(all, attack{path[:i] + url.PathEscape(payload) + path[j+1:], good.Replace(x.body)})
	}
	if op.RequestBody == nil || op.RequestBody.Value.Content["application/json"] == nil {
		return all
	}
	for name, property := range op.RequestBody.Value.Content["application/json"].Schema.Value.Properties {
		var value any
		switch {
		case property.Value.Type.Is("string"):
			value = payload
		case property.Value.Type.Is("object"):
			value = map[string]string{payload: payload}
		case property.Value.Type.Is("array") && property.Value.Items.Value.Type.Is("string"):
			value = []string{payload, payload}
		case property.Value.Type.Is("array"):
			value = []any{map[string]string{"kind": payload, "code": payload}}
		default:
			continue
		}
		body := map[string]any{}
		if x.body != "" {
			if err := json.Unmarshal([]byte(good.Replace(x.body)), &body); err != nil {
				panic(err)
			}
		}
		if body[name] = value; name == "probe" {
			body["timeout_secs"] = 1 // it may never succeed
		}
		data, err := json.Marshal(body)
		if err != nil {
			panic(err)
		}
		all = append(all, attack{good.Replace(x.path), string(data)})
	}
	return all
}

// strike makes one attack: it may be answered with anything but a fault of the daemon, and with nothing of the host's.
func (m *matrix) strike(method, path, body string) {
	m.t.Helper()
	got := m.request("run", method, path, body, nil)
	if got.status >= 500 && got.status != http.StatusServiceUnavailable {
		m.t.Errorf("%s %.100s %.200s = %d %.300s", method, path, body, got.status, got.body)
	}
	if bytes.Contains(got.body, []byte("root:")) || bytes.Contains(got.body, []byte("base")) && bytes.Contains(got.body, []byte(`"tenant":"default"`)) || got.header.Get("X-Injected") != "" {
		m.t.Errorf("%s %.100s %.200s tells %.300s", method, path, body, got.body)
	}
	if got.status == http.StatusCreated && strings.HasSuffix(path, "/sandboxes") { // a free text went through: do not pile them up
		var list []api.SandboxInfo
		if json.Unmarshal(got.body, &list) == nil {
			for _, s := range list {
				m.must(204, "run", "DELETE", "/v1/sandboxes/"+s.ID, "")
			}
		}
	}
}

// tree is what lies in the daemon's directories, but for what its own ids name.
func (d *liveDaemon) tree() map[string]bool {
	all := map[string]bool{}
	for _, dir := range []string{d.dir, d.dir + "/data", d.dir + "/run", filepath.Dir(d.dir), "."} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			d.t.Fatal(err)
		}
		for _, e := range entries {
			if dir != filepath.Dir(d.dir) || strings.Contains(e.Name(), "pwned") || strings.Contains(e.Name(), "passwd") {
				all[filepath.Join(dir, e.Name())] = true
			}
		}
	}
	return all
}

// checkLogAndRecord holds that nobody wrote a line of their own into the log or the record.
func (d *liveDaemon) checkLogAndRecord() {
	d.t.Helper()
	for _, line := range strings.Split(strings.TrimSpace(d.log.String()), "\n") {
		if !strings.HasPrefix(line, "time=") {
			d.t.Errorf("a line of the log that is not the daemon's own: %.200q", line)
		}
		if strings.ContainsAny(line, "\x1b\r") {
			d.t.Errorf("control characters in the log: %.200q", line)
		}
	}
	report, err := audit.Verify(d.dir+"/data/audit", audit.VerifyOptions{})
	if err != nil || len(report.Problems) > 0 {
		d.t.Errorf("the record: %+v, %v", report.Problems, err)
	}
	data, err := os.ReadFile(d.recordFile())
	if err != nil {
		d.t.Fatal(err)
	}
	for line := range bytes.Lines(data) {
		if bytes.ContainsAny(line, "\x1b\r") || bytes.Contains(line, []byte("fk_")) {
			d.t.Errorf("what must not be in the record: %.300q", line)
		}
	}
}

// TestAttacksByHeadersAndJSON tries what readers of HTTP and JSON understand in more than one way.
func TestAttacksByHeadersAndJSON(t *testing.T) {
	m := newMatrix(t)
	deep := `{"snapshot_tag": "acmetag", "metadata": ` + strings.Repeat(`{"a":`, 20_000) + "1" + strings.Repeat("}", 20_000) + "}"
	for name, body := range map[string]string{
		"a field twice":            `{"snapshot_tag": "acmetag", "snapshot_tag": "base"}`,
		"a field in capitals":      `{"SNAPSHOT_TAG": "acmetag"}`,
		"secrets in capitals":      `{"snapshot_tag": "acmetag", "Secrets": {"A": "hunter2"}}`,
		"secrets in odd letters":   `{"snapshot_tag": "acmetag", "\u017fecrets": {"A": "hunter2"}}`,
		"env twice":                `{"snapshot_tag": "acmetag", "env": {"A": "hunter2"}, "env": {"B": "hunter2"}}`,
		"deep":                     deep,
		"two documents":            `{"snapshot_tag": "acmetag"}{"snapshot_tag": "base"}`,
		"not UTF-8":                "{\"snapshot_tag\": \"acme\xff\"}",
		"a byte order mark":        "\ufeff" + `{"snapshot_tag": "acmetag"}`,
		"a tenant of one's own":    `{"snapshot_tag": "acmetag", "tenant": "default"}`,
		"a huge number":            `{"snapshot_tag": "acmetag", "n": 1e400}`,
		"a number that overflows":  `{"snapshot_tag": "acmetag", "n": 9223372036854775808}`,
		"a prototype":              `{"snapshot_tag": "acmetag", "__proto__": {"n": 1}}`,
		"a list":                   `[{"snapshot_tag": "acmetag"}]`,
		"a comment":                `{"snapshot_tag": "acmetag" /* */}`,
		"times that are no number": `{"snapshot_tag": "acmetag", "timeout_secs": NaN}`,
	} {
		if got := m.request("run", "POST", "/v1/sandboxes", body, nil); got.status != 400 {
			t.Errorf("%s = %d %.200s, want 400", name, got.status, got.body)
		}
	}
	for name, header := range map[string]map[string]string{
		"who is asking, told by itself": {"X-Forwarded-For": "127.0.0.1", "X-Forwarded-User": "root", "Forkd-Tenant": "default", "X-Real-Ip": "127.0.0.1"},
		"another method":                {"X-Http-Method-Override": "DELETE", "X-Http-Method": "DELETE"},
		"another host":                  {"X-Forwarded-Host": "evil.example", "X-Original-Url": "/healthz", "X-Rewrite-Url": "/v1/keys"},
	} {
		if got := m.request("run", "GET", "/v1/keys", "", header); got.status != 403 {
			t.Errorf("%s: keys = %d, want 403", name, got.status)
		}
		if got := m.request("none", "GET", "/v1/sandboxes", "", header); got.status != 401 {
			t.Errorf("%s: without a key = %d, want 401", name, got.status)
		}
		m.must(200, "run", "GET", "/v1/sandboxes/"+m.sandbox, "")
	}
	for _, auth := range []string{"Basic cm9vdDpyb290", "Bearer", "Bearer  " + tokenOf("run"), "bearer\t" + tokenOf("run"), "Bearer " + tokenOf("run") + ", Bearer x",
		"Bearer " + strings.ToUpper(tokenOf("run")), "Bearer fk_" + idOf("run") + "_", "Bearer " + strings.Repeat("a", 30_000)} {
		if got := m.request("none", "GET", "/v1/sandboxes", "", map[string]string{"Authorization": auth}); got.status != 401 {
			t.Errorf("Authorization %.40q = %d, want 401", auth, got.status)
		}
	}
	data, err := os.ReadFile(m.recordFile())
	if err != nil || bytes.Contains(data, []byte("hunter2")) {
		t.Errorf("a secret is in the record, or it can't be read: %v", err)
	}
	if strings.Contains(m.log.String(), "hunter2") {
		t.Error("a secret is in the log")
	}
	m.checkLogAndRecord()
}

// raw sends bytes and reads what comes back until the connection ends.
func (d *liveDaemon) raw(request string) string {
	d.t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(d.url, "http://"))
	if err != nil {
		d.t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, request); err != nil {
		d.t.Fatal(err)
	}
	_ = conn.(*net.TCPConn).CloseWrite()
	_ = conn.SetReadDeadline(time.Now().Add(20 * time.Second))
	answer, _ := io.ReadAll(conn)
	return string(answer)
}

// TestAttacksByRawHTTP sends what no client library sends: nothing of it smuggles a request past the key, or takes the daemon down.
func TestAttacksByRawHTTP(t *testing.T) {
	m := newMatrix(t)
	auth := "Authorization: Bearer " + tokenOf("run") + "\r\n"
	inner := "GET /v1/keys HTTP/1.1\r\nHost: x\r\n\r\n"
	for name, request := range map[string]string{
		"length and chunks":     "POST /v1/sandboxes/" + m.sandbox + "/ping HTTP/1.1\r\nHost: x\r\n" + auth + "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + inner,
		"two lengths":           "POST /v1/sandboxes/" + m.sandbox + "/ping HTTP/1.1\r\nHost: x\r\n" + auth + "Content-Length: 0\r\nContent-Length: 40\r\n\r\n" + inner,
		"an odd encoding":       "POST /v1/sandboxes/" + m.sandbox + "/ping HTTP/1.1\r\nHost: x\r\n" + auth + "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + inner,
		"a space in a name":     "GET /v1/sandboxes HTTP/1.1\r\nHost: x\r\nAuthorization : Bearer " + tokenOf("host-admin") + "\r\n\r\n",
		"two keys":              "GET /v1/keys HTTP/1.1\r\nHost: x\r\n" + auth + "Authorization: Bearer " + tokenOf("host-admin") + "\r\n\r\n",
		"a whole URL":           "GET http://evil.example/v1/sandboxes HTTP/1.1\r\nHost: x\r\n\r\n",
		"no version":            "GET /v1/sandboxes\r\n\r\n",
		"an unknown method":     "PROPFIND /v1/sandboxes HTTP/1.1\r\nHost: x\r\n\r\n",
		"a path of dots":        "GET /v1/../v1/keys HTTP/1.1\r\nHost: x\r\n" + auth + "\r\n",
		"a path of two slashes": "GET //v1/keys HTTP/1.1\r\nHost: x\r\n" + auth + "\r\n",
		"health, and more":      "GET /healthz/../v1/keys HTTP/1.1\r\nHost: x\r\n\r\n",
		"large headers":         "GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + strings.Repeat("a", 200_000) + "\r\n\r\n",
		"HTTP/2":                "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
		"CONNECT":               "CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: x\r\n\r\n",
	} {
		answer := m.raw(request)
		answers := bufio.NewReader(strings.NewReader(answer))
		for {
			resp, err := http.ReadResponse(answers, nil)
			if err != nil {
				break
			}
			body, _ := io.ReadAll(resp.Body)
			if resp.StatusCode == http.StatusOK && !bytes.Contains(body, []byte(`"pong"`)) || bytes.Contains(body, []byte(`"scope"`)) {
				t.Errorf("%s: answered %d %.200s", name, resp.StatusCode, body)
			}
		}
	}
	m.must(200, "run", "GET", "/v1/sandboxes/"+m.sandbox, "")
	m.checkLogAndRecord()
}

// TestAttacksBySize sends what is large or never ends: it is refused, early where nobody is known, and keeps nobody else waiting.
func TestAttacksBySize(t *testing.T) {
	m := newMatrix(t)
	large := `{"snapshot_tag": "acmetag", "metadata": {"a": "` + strings.Repeat("x", 2<<20) + `"}}`
	if got := m.request("run", "POST", "/v1/sandboxes", large, nil); got.status != 413 {
		t.Errorf("2 MiB = %d %s, want 413", got.status, got.body)
	}
	endless := "POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: 1099511627776\r\n"
	if answer := m.raw(endless + "\r\n{"); !strings.HasPrefix(answer, "HTTP/1.1 401") {
		t.Errorf("an endless body without a key = %.80q, want 401", answer)
	}
	var slow []net.Conn
	defer func() {
		for _, conn := range slow {
			conn.Close()
		}
	}()
	for i := range 300 { // slow ones: half a header, half a body, with a key and without
		conn, err := net.Dial("tcp", strings.TrimPrefix(m.url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		slow = append(slow, conn)
		begin := "POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + tokenOf("run") + "\r\n"
		if i%2 == 0 {
			begin += "Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
		}
		fmt.Fprint(conn, begin)
	}
	m.must(200, "admin", "GET", "/v1/sandboxes/"+m.sandbox, "")
	m.must(201, "run", "POST", "/v1/sandboxes", `{"snapshot_tag": "acmetag"}`)
}

// TestOthersImages holds that an image which is not shared is, to other tenants, like one that is not there.
func TestOthersImages(t *testing.T) {
	m := newMatrix(t)
	m.must(200, "host-admin", "PUT", "/v1/images/base/sharing", `{"public": false}`)
	var img api.ImageInfo
	m.decode(m.must(200, "host-admin", "GET", "/v1/images/base", ""), &img)
	for _, name := range []string{"base", img.ID} {
		for _, x := range []struct{ method, path, body string }{
			{"GET", "/v1/images/%s", ""}, {"POST", "/v1/snapshots", `{"tag": "x", "image": "%s"}`}, {"POST", "/v1/snapshots", `{"tag": "x", "rootfs": "%s"}`},
		} {
			ask := func(name string) string {
				got := m.request("run", x.method, strings.ReplaceAll(x.path, "%s", name), strings.ReplaceAll(x.body, "%s", name), nil)
				return fmt.Sprint(got.status, strings.NewReplacer(name, "X", got.id, "ID").Replace(string(got.body)))
			}
			if theirs, none := ask(name), ask("nosuch"); theirs != none || !strings.HasPrefix(none, "404") {
				t.Errorf("%s %s: another tenant's image = %s, none = %s", x.method, x.path, theirs, none)
			}
		}
	}
	if got := m.must(200, "run", "GET", "/v1/images", ""); bytes.Contains(got.body, []byte(img.ID)) {
		t.Errorf("images = %s", got.body)
	}
}
