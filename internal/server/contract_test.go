package server

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers"
	"github.com/getkin/kin-openapi/routers/gorillamux"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/internal/sandbox"
)

// contract checks requests and answers against api/openapi.yaml.
type contract struct {
	doc    *openapi3.T
	router routers.Router
}

func loadContract(t *testing.T) *contract {
	t.Helper()
	doc, err := openapi3.NewLoader().LoadFromData(api.Spec)
	if err != nil {
		t.Fatalf("load openapi.yaml: %v", err)
	}
	if err := doc.Validate(t.Context()); err != nil {
		t.Fatalf("openapi.yaml is not valid: %v", err)
	}
	doc.Servers = nil // any host
	router, err := gorillamux.NewRouter(doc)
	if err != nil {
		t.Fatal(err)
	}
	return &contract{doc, router}
}

// check validates one exchange; strict also refuses fields that the document doesn't have.
func (c *contract) check(ctx context.Context, req *http.Request, got answer) error {
	route, params, err := c.router.FindRoute(req)
	if err != nil {
		return err
	}
	in := &openapi3filter.RequestValidationInput{Request: req, PathParams: params, Route: route,
		Options: &openapi3filter.Options{AuthenticationFunc: openapi3filter.NoopAuthenticationFunc, IncludeResponseStatus: true}}
	if err := openapi3filter.ValidateRequest(ctx, in); err != nil {
		return err
	}
	out := &openapi3filter.ResponseValidationInput{RequestValidationInput: in, Status: got.status, Header: got.header,
		Body: io.NopCloser(strings.NewReader(got.body)), Options: in.Options}
	return openapi3filter.ValidateResponse(ctx, out)
}

// TestContract holds that what the server answers is what the document says, and that every operation is tried.
func TestContract(t *testing.T) {
	t.Parallel()
	c := loadContract(t)
	openapi3filter.RegisterBodyDecoder("application/yaml", openapi3filter.PlainBodyDecoder)
	openapi3filter.RegisterBodyDecoder("text/event-stream", openapi3filter.PlainBodyDecoder)
	f := newFixture(t, withKeys(t))
	f.token = f.server.Token
	exchanges := []struct{ method, path, body string }{
		{"GET", "/healthz", ""},
		{"GET", "/version", ""},
		{"GET", "/metrics", ""},
		{"GET", "/openapi.yaml", ""},
		{"GET", "/v1/keys", ""},
		{"POST", "/v1/keys", `{"name": "k", "scope": "run", "tenant": "acme", "max_sandboxes": 3}`},
		{"DELETE", "/v1/keys/" + contractKey, ""},
		{"PUT", "/v1/images/py/sharing", `{"public": true}`},
		{"PUT", "/v1/snapshots/py/sharing", `{"public": true}`},
		{"GET", "/v1/images", ""},
		{"POST", "/v1/images", `{"name": "py", "packages": ["python3-numpy"], "force": true}`},
		{"GET", "/v1/images/py", ""},
		{"DELETE", "/v1/images/py", ""},
		{"GET", "/v1/snapshots", ""},
		{"POST", "/v1/snapshots", `{"tag": "t", "image": "py", "warm_up": [{"kind": "eval", "code": "1"}]}`},
		{"POST", "/v1/snapshots", `{"tag": "t", "kernel": "/k", "rootfs": "py", "rw": false, "boot_wait_secs": 10, "tap": null}`},
		{"DELETE", "/v1/snapshots/py?force=true", ""},
		{"GET", "/v1/snapshots/py/info", ""},
		{"POST", "/v1/snapshots/py/verify", ""},
		{"GET", "/v1/snapshots/py/pool", ""},
		{"PUT", "/v1/snapshots/py/pool", `{"size": 3}`},
		{"GET", "/v1/sandboxes", ""},
		{"GET", "/v1/sandboxes?all=true", ""},
		{"POST", "/v1/sandboxes", `{"snapshot_tag": "py", "n": 3, "per_child_netns": true, "memory_limit_mib": 256}`},
		{"POST", "/v1/sandboxes", `{"snapshot_tag": "py", "report": true}`},
		{"GET", "/v1/sandboxes/sb1", ""},
		{"DELETE", "/v1/sandboxes/sb1", ""},
		{"POST", "/v1/sandboxes/sb1/ping", ""},
		{"POST", "/v1/sandboxes/sb1/exec", `{"args": ["ls"], "timeout_secs": 30}`},
		{"POST", "/v1/sandboxes/sb1/exec", `{"args": ["ls"], "encoding": "base64"}`},
		{"POST", "/v1/sandboxes/sb1/eval", `{"code": "1+1"}`},
		{"GET", "/v1/sandboxes/sb1/logs", ""},
		{"POST", "/v1/sandboxes/sb1/timeout", `{"timeout_secs": 60}`},
		{"GET", "/v1/sandboxes/sb1/stats", ""},
		{"GET", "/v1/sandboxes/sb1/network", ""},
		{"PUT", "/v1/sandboxes/sb1/network", `{"mode": "allow", "allow": ["*.example.org:443", "10.0.0.0/8"], "bandwidth_mbit": 10}`},
		{"POST", "/v1/sandboxes", `{"snapshot_tag": "py", "network": {"mode": "open"}}`},
		{"GET", "/v1/sandboxes/sb1/tunnel/80", ""},
		{"GET", "/v1/sandboxes/sb1/ports/80/x", ""},
		{"GET", "/v1/tree", ""},
		{"POST", "/v1/images/prune", ""},
		{"POST", "/v1/snapshots/py/diff", `{"tag": "b", "steps": [{"kind": "exec", "code": "true"}], "timeout_secs": 9, "env": {"A": "1"}}`},
		{"POST", "/v1/snapshots/py/compact", `{"to": "flat"}`},
		{"GET", "/v1/snapshots/py/pack", ""},
		{"GET", "/v1/snapshots/py/pack/contents", ""},
		{"POST", "/v1/snapshots/unpack?tag=new", "pack"},
		{"POST", "/v1/sandboxes/sb1/branch", ""},
		{"POST", "/v1/sandboxes/sb1/branch", `{"tag": "b", "mode": "live", "wait": false}`},
		{"POST", "/v1/sandboxes/sb1/branch", `{"diff": true, "parent_tag": "py"}`},
		{"POST", "/v1/sandboxes/sb1/fork", ""},
		{"POST", "/v1/sandboxes/sb1/fork", `{"n": 3, "tag": "b", "env": {"A": "1"}, "report": true}`},
		{"POST", "/v1/sandboxes/sb1/suspend", ""},
		{"POST", "/v1/sandboxes/sb1/resume", ""},
		{"GET", "/v1/workspaces", ""},
		{"POST", "/v1/workspaces", `{"name": "w", "snapshot_tag": "py", "per_child_netns": true, "memory_limit_mib": 256}`},
		{"GET", "/v1/workspaces/w", ""},
		{"DELETE", "/v1/workspaces/w", ""},
		{"POST", "/v1/workspaces/w/suspend", `{"diff": true}`},
		{"POST", "/v1/workspaces/w/suspend", ""},
		{"POST", "/v1/workspaces/w/resume", ""},
		{"GET", "/v1/events", ""},
	}
	f.server.Events.Close() // the stream ends at once
	f.guest = func(c net.Conn) {
		defer c.Close()
		if req, err := http.ReadRequest(bufio.NewReader(c)); err == nil {
			_ = (&http.Response{StatusCode: 200, ProtoMajor: 1, ProtoMinor: 1, Request: req, Body: http.NoBody}).Write(c)
		}
	}
	tried := map[string]bool{}
	for _, x := range exchanges {
		got, err := f.exchange(t, c, x.method, x.path, x.body)
		if err != nil {
			t.Errorf("%s %s %s: %v\n%s", x.method, x.path, x.body, err, got.body)
		}
		if got.status >= 300 {
			t.Errorf("%s %s = %d %s", x.method, x.path, got.status, got.body)
		}
		req, _ := http.NewRequest(x.method, x.path, nil)
		if route, _, err := c.router.FindRoute(req); err == nil {
			tried[route.Operation.OperationID] = true
		}
	}
	for path, item := range c.doc.Paths.Map() {
		for method, op := range item.Operations() {
			if !tried[op.OperationID] {
				t.Errorf("%s %s is not tried", method, path)
			}
		}
	}
	if n := len(tried); n != len(f.server.routes())+1 { // the proxy is none of the mux
		t.Errorf("the document has %d operations, the server %d routes", n, len(f.server.routes()))
	}
}

// TestContractOfErrors holds the shape of errors, and of what is partly one.
func TestContractOfErrors(t *testing.T) {
	t.Parallel()
	c := loadContract(t)
	f := newFixture(t)
	f.fail = &sandbox.Error{Code: sandbox.CodeInsufficientMemory, Message: "m", Hint: "h"}
	if got, err := f.exchange(t, c, "POST", "/v1/sandboxes", forkBody); err != nil || got.status != 503 {
		t.Errorf("= %d, %v", got.status, err)
	}
	f.fork = func(context.Context, sandbox.ForkRequest) ([]sandbox.ForkResult, error) {
		sb := stubSandbox(0)
		return []sandbox.ForkResult{{Sandbox: &sb}, {Err: errors.New("x")}}, nil
	}
	if got, err := f.exchange(t, c, "POST", "/v1/sandboxes", `{"snapshot_tag": "py", "n": 2, "report": true}`); err != nil || got.status != 207 {
		t.Errorf("= %d, %v", got.status, err)
	}
	if got, err := f.exchange(t, c, "POST", "/v1/sandboxes", `{"snapshot_tag": "py", "n": 2}`); err != nil || got.status != 201 {
		t.Errorf("= %d, %v", got.status, err)
	}
}

func (f *fixture) exchange(t *testing.T, c *contract, method, path, body string) (answer, error) {
	t.Helper()
	kind := "application/json"
	if strings.Contains(path, "/unpack") {
		kind = octets
	}
	headers := []string{"Content-Type", kind}
	if strings.Contains(path, "/tunnel/") {
		guest := f.guest
		f.guest = nil
		defer func() { f.guest = guest }()
		headers = append(headers, "Connection", "Upgrade", "Upgrade", tunnelProtocol)
	}
	got := f.do(t, method, path, body, headers...)
	req, err := http.NewRequestWithContext(t.Context(), method, path, bytes.NewReader([]byte(body)))
	if err != nil {
		t.Fatal(err)
	}
	if body != "" {
		req.Header.Set("Content-Type", kind)
	}
	return got, c.check(t.Context(), req, got)
}
