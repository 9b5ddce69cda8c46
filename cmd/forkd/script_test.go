package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers/gorillamux"
	"github.com/rogpeppe/go-internal/testscript"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/internal/confine"
	"github.com/forkd/forkd/internal/failpoint"
	"github.com/forkd/forkd/internal/vmm"
	"github.com/forkd/forkd/internal/vmm/vmmtest"
)

// faultsEnv holds the failures to inject into a daemon under test, as JSON of []vmmtest.Fault.
const faultsEnv = "FORKD_TEST_FAULTS"

// TestMain lets this binary be three things: a fake machine, the forkd of a script, and the tests.
func TestMain(m *testing.M) {
	vmmtest.RunMachineIfAsked()
	openapi3filter.RegisterBodyDecoder("application/yaml", openapi3filter.PlainBodyDecoder)
	testscript.Main(m, map[string]func(){"forkd": func() {
		ctx, stop := untilSignal()
		code := run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr, os.Environ(), fakeParts())
		stop()
		os.Exit(code)
	}})
}

// fakeParts are a daemon's parts on a host that can run no guests.
func fakeParts() parts {
	return parts{
		engine: func(f *daemonFlags, _ *confine.Users, _ *slog.Logger) vmm.Engine {
			var options vmmtest.FakeOptions
			if faults := os.Getenv(faultsEnv); faults != "" {
				if err := json.Unmarshal([]byte(faults), &options.Faults); err != nil {
					panic(fmt.Errorf("%s: %w", faultsEnv, err))
				}
			}
			records := filepath.Join(f.RunDir, "fake")
			if err := os.MkdirAll(records, 0o700); err != nil {
				panic(err)
			}
			return vmmtest.NewFake(records, options)
		},
		agent: func() ([]byte, error) { return []byte("agent"), nil },
	}
}

// TestScripts runs the command line flows of test/script.
func TestScripts(t *testing.T) {
	published := publishedClients(t)
	testscript.Run(t, testscript.Params{
		Dir:                 filepath.Join("..", "..", "test", "script"),
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		UpdateScripts:       os.Getenv("UPDATE_SCRIPTS") != "",
		Setup:               func(env *testscript.Env) error { return setupScript(env, published) },
		Condition: func(name string) (bool, error) {
			if name != "published" {
				return false, fmt.Errorf("unknown condition %q", name)
			}
			return published != "", nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"serve": cmdServe, "stop": cmdStop, "crash": cmdCrash, "machines": cmdMachines, "rest": cmdREST,
			"setenv": func(ts *testscript.TestScript, _ bool, args []string) { // setenv NAME FILE
				ts.Setenv(args[0], strings.TrimSpace(ts.ReadFile(args[1])))
			},
		},
	})
}

// publishedClients returns the Python path under which the published packages are found, or "". They are installed for this test
// when FORKD_NET_TESTS is set.
func publishedClients(t *testing.T) string {
	has := func(path string) bool {
		cmd := exec.CommandContext(t.Context(), "python3", "-c", "import forkd.controller, forkd_mcp.server")
		cmd.Env = append(os.Environ(), "PYTHONPATH="+path)
		return cmd.Run() == nil
	}
	if path := os.Getenv("PYTHONPATH"); has(path) {
		return path + string(os.PathListSeparator)
	}
	if os.Getenv("FORKD_NET_TESTS") == "" {
		return ""
	}
	dir := t.TempDir()
	pip := exec.CommandContext(t.Context(), "python3", "-m", "pip", "install", "--quiet", "--target", dir, "forkd==0.5.3", "forkd-mcp==0.2.1")
	if out, err := pip.CombinedOutput(); err != nil {
		t.Fatalf("install the published clients: %v\n%s", err, out)
	}
	if !has(dir) {
		t.Fatal("the published clients were installed and can't be imported")
	}
	return dir
}

// setupScript gives a script directories of its own, short enough for sockets, and an image's ingredients.
func setupScript(env *testscript.Env, pythonPath string) error {
	dir, err := os.MkdirTemp("", "fk")
	if err != nil {
		return err
	}
	p := &daemonProcess{}
	env.Values[daemonKey{}] = p
	env.Defer(func() {
		_ = p.end(syscall.SIGTERM)
		if out, err := forkdCommand(dir, "cleanup", "--all").CombinedOutput(); err != nil {
			env.T().Log(fmt.Sprintf("cleanup: %v\n%s", err, out))
		}
		if left := machines(dir); len(left) > 0 {
			env.T().Log(fmt.Sprintf("machines left over: %v", left))
			env.T().FailNow()
		}
		os.RemoveAll(dir)
	})
	for name, value := range map[string]string{"D": dir, "FORKD_URL": filepath.Join(dir, "run", "forkd.sock"), "HOME": dir, "PYTHONPATH": pythonPath} {
		env.Setenv(name, value)
	}
	if err := writeImageFiles(env.WorkDir); err != nil {
		return err
	}
	return nil
}

// daemonProcess is the daemon that a script started last.
type daemonProcess struct {
	cmd    *exec.Cmd
	exited chan struct{} // closed when it has
}

type daemonKey struct{}

func theDaemon(ts *testscript.TestScript) *daemonProcess {
	return ts.Value(daemonKey{}).(*daemonProcess)
}

// cmdServe starts a daemon over $D and waits until it says that it is ready: serve [FLAGS…]
func cmdServe(ts *testscript.TestScript, neg bool, args []string) {
	if neg {
		ts.Fatalf("serve can't be negated: use ! exec forkd serve")
	}
	dir := ts.Getenv("D")
	socket := filepath.Join(dir, "notify")
	ready, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	ts.Check(err)
	defer os.Remove(socket)
	defer ready.Close()
	log, err := os.OpenFile(ts.MkAbs("daemon.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	ts.Check(err)
	defer log.Close()
	cmd := forkdCommand(dir, "serve", append([]string{"--listen", "", "--log-level", "debug", "--drain-timeout", "10s"}, args...)...)
	cmd.Env = append(cmd.Env, "NOTIFY_SOCKET="+socket, faultsEnv+"="+ts.Getenv(faultsEnv), failpoint.Variable+"="+ts.Getenv(failpoint.Variable))
	cmd.Stdout, cmd.Stderr = log, log
	ts.Check(cmd.Start())
	p := theDaemon(ts)
	p.cmd, p.exited = cmd, make(chan struct{})
	go func(exited chan struct{}) {
		_ = cmd.Wait()
		close(exited)
		ready.Close() // wakes the reader below when it never got ready
	}(p.exited)
	message := make([]byte, 64)
	n, err := ready.Read(message)
	if err != nil || string(message[:n]) != "READY=1" {
		ts.Fatalf("the daemon did not get ready:\n%s", ts.ReadFile("daemon.log"))
	}
}

// forkdCommand is this binary as the forkd of a script.
func forkdCommand(dir, command string, args ...string) *exec.Cmd {
	self, err := os.Executable()
	if err != nil {
		panic(err)
	}
	where := []string{"forkd", command, "--data", dir + "/data", "--run", dir + "/run", "--cache", dir + "/cache"}
	return &exec.Cmd{Path: self, Args: append(where, args...), Env: []string{"HOME=" + dir, "PATH=" + os.Getenv("PATH")}}
}

// end signals the daemon and waits for it; it is no error when there is none.
func (p *daemonProcess) end(sig syscall.Signal) error {
	if p.cmd == nil {
		return nil
	}
	_ = p.cmd.Process.Signal(sig)
	select {
	case <-p.exited:
	case <-time.After(30 * time.Second):
		_ = p.cmd.Process.Kill()
		<-p.exited
		return fmt.Errorf("the daemon did not stop within 30 s")
	}
	state := p.cmd.ProcessState
	p.cmd = nil
	if sig == syscall.SIGTERM && !state.Success() {
		return fmt.Errorf("the daemon ended with %s", state)
	}
	return nil
}

// cmdStop stops the daemon politely, and it must end well: stop
func cmdStop(ts *testscript.TestScript, _ bool, _ []string) {
	if err := theDaemon(ts).end(syscall.SIGTERM); err != nil {
		ts.Fatalf("%v\n%s", err, ts.ReadFile("daemon.log"))
	}
}

// cmdCrash kills the daemon: crash
func cmdCrash(ts *testscript.TestScript, _ bool, _ []string) {
	ts.Check(theDaemon(ts).end(syscall.SIGKILL))
}

// cmdMachines counts the machines that live: machines N
func cmdMachines(ts *testscript.TestScript, _ bool, args []string) {
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	if got := machines(ts.Getenv("D")); len(got) != want {
		ts.Fatalf("%d machines live (%v), want %d\n%s", len(got), got, want, ts.ReadFile("daemon.log"))
	}
}

// machines finds the processes of fake machines below a directory.
func machines(dir string) []int {
	var pids []int
	environs, _ := filepath.Glob("/proc/[0-9]*/environ")
	for _, path := range environs {
		data, err := os.ReadFile(path)
		if err == nil && strings.Contains(string(data), "FORKD_FAKE_MACHINE=") && strings.Contains(string(data), dir+"/") {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			pids = append(pids, pid)
		}
	}
	return pids
}

// cmdREST makes a request and checks its status and, unless it is "-", the code of its error: rest STATUS CODE METHOD PATH [BODY]
// The answer is printed to stdout.
func cmdREST(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 4 || len(args) > 5 {
		ts.Fatalf("usage: rest STATUS CODE METHOD PATH [BODY]")
	}
	var body io.Reader
	if len(args) == 5 {
		body = strings.NewReader(args[4])
	}
	req, err := http.NewRequest(args[2], "http://forkd"+args[3], body)
	ts.Check(err)
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", ts.Getenv("FORKD_URL"))
	}}
	defer transport.CloseIdleConnections()
	resp, err := transport.RoundTrip(req)
	ts.Check(err)
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	ts.Check(err)
	fmt.Fprintf(ts.Stdout(), "%s", data)
	var e api.Error
	_ = json.Unmarshal(data, &e)
	if err := checkContract(req, resp, data); err != nil {
		ts.Fatalf("%s %s is not what openapi.yaml says: %v\n%s", args[2], args[3], err, data)
	}
	if code := e.Code; strconv.Itoa(resp.StatusCode) != args[0] || (args[1] != "-" && code != args[1]) {
		ts.Fatalf("%s %s = %d %q, want %s %q\n%s", args[2], args[3], resp.StatusCode, code, args[0], args[1], data)
	}
}

// checkContract validates an answer of a route that openapi.yaml has.
func checkContract(req *http.Request, resp *http.Response, body []byte) error {
	doc, err := openapi3.NewLoader().LoadFromData(api.Spec)
	if err != nil {
		return err
	}
	doc.Servers = nil // any host
	router, err := gorillamux.NewRouter(doc)
	if err != nil {
		return err
	}
	route, params, err := router.FindRoute(req)
	if err != nil { // a request that is meant to fail
		return nil
	}
	in := &openapi3filter.RequestValidationInput{Request: req, PathParams: params, Route: route}
	out := &openapi3filter.ResponseValidationInput{RequestValidationInput: in, Status: resp.StatusCode, Header: resp.Header,
		Options: &openapi3filter.Options{IncludeResponseStatus: true}}
	out.SetBodyBytes(body)
	return openapi3filter.ValidateResponse(req.Context(), out)
}

// writeImageFiles writes what an image is built from: a kernel and a root file system that have nothing but their headers.
func writeImageFiles(dir string) error {
	kernel := make([]byte, 0x1000) // the header of a bzImage, as far as its version goes
	copy(kernel[0x202:], "HdrS")
	binary.LittleEndian.PutUint16(kernel[0x20e:], 0x600)
	copy(kernel[0x800:], "6.1.0-test\x00")
	rootfs := make([]byte, 0x2000)
	binary.LittleEndian.PutUint32(rootfs[1024:], 0xE0F5E1E2) // erofs
	for name, data := range map[string][]byte{"vmlinuz": kernel, "root.erofs": rootfs} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			return err
		}
	}
	return nil
}
