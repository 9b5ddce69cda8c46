package firecracker

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/confine/jailertest"
	"github.com/forkd/forkd/internal/guest/agent"
	"github.com/forkd/forkd/internal/vmm/probeguest"
)

// The fake Firecracker is this test binary under the name of Firecracker, in a directory that holds its orders. It checks each request
// by the rules of the published API description, and fails as it is told to.

// fakeOrders is what a fake Firecracker is to do.
type fakeOrders struct {
	Version string   // what it says to --version; default 1.16.1
	Fault   string   // at which call, as "PUT /vsock", or "PATCH /vm Resumed"; "start": before it listens; empty: none
	Kind    string   // how: one of faultKinds
	Once    bool     // it fails at the first such call only
	Lacks   []string // "state-only": it opens the memory's file first
	Agent   bool     // a guest's agent listens on its vsock
}

var faultKinds = []string{"kill", "stall", "garbage", "half", "close", "refuse"}

const fakeOrdersFile = "orders.json"

// newFake returns the path of a fake Firecracker.
func newFake(t *testing.T, orders fakeOrders) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	b, err := json.Marshal(orders)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, DefaultBinary)
	if err := errors.Join(os.WriteFile(filepath.Join(dir, fakeOrdersFile), b, 0o600), os.Symlink(self, path)); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestMain(m *testing.M) {
	if jailertest.Is(os.Args[0]) {
		os.Exit(jailertest.Main(os.Args))
	}
	if filepath.Base(os.Args[0]) == DefaultBinary {
		os.Exit(fakeMain())
	}
	os.Exit(m.Run())
}

func fakeMain() int {
	var orders fakeOrders
	path := os.Args[0]
	if self, err := os.Executable(); err == nil && filepath.Dir(path) == "/" { // in a jail, where its orders are beside what was bound there
		path = self
	}
	b, err := os.ReadFile(filepath.Join(filepath.Dir(path), fakeOrdersFile))
	if err == nil {
		err = json.Unmarshal(b, &orders)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "fake:", err)
		return 3
	}
	if slices.Contains(os.Args, "--version") {
		if orders.Version == "" {
			orders.Version = "1.16.1"
		}
		fmt.Printf("Firecracker v%s\n\nexiting\n", orders.Version)
		return 0
	}
	f := &fake{orders: orders, puts: map[string]json.RawMessage{}}
	if err := f.serve(); err != nil {
		fmt.Fprintln(os.Stderr, "fake:", err)
		return 2
	}
	return 0
}

// fake is one fake Firecracker.
type fake struct {
	orders fakeOrders
	puts   map[string]json.RawMessage // what was configured, by path

	mu       sync.Mutex
	started  bool
	running  bool
	saved    bool
	tap      int            // a descriptor
	tapName  string         // "" without a network device
	ran      bool           // the guest has run since it was loaded
	deaf     bool           // nothing gets to the guest any more
	guests   []*net.TCPConn // connections to the guest's agent
	listener net.Listener   // of the agent
}

func (f *fake) serve() error {
	f.fault("start", nil)
	l, err := net.Listen("unix", "api.sock")
	if err != nil {
		return err
	}
	go f.serial()
	for {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		go f.connection(conn)
	}
}

// serial echoes, like the probe guest.
func (f *fake) serial() {
	buf := make([]byte, 64)
	for {
		n, err := os.Stdin.Read(buf)
		if err != nil {
			return
		}
		for !f.runs() {
			time.Sleep(time.Millisecond)
		}
		os.Stdout.Write(buf[:n])
	}
}

func (f *fake) runs() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.running
}

func (f *fake) hears() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.running && !f.deaf
}

func (f *fake) connection(conn net.Conn) {
	in := bufio.NewReader(conn)
	for {
		request, err := http.ReadRequest(in)
		if err != nil {
			return
		}
		body, err := io.ReadAll(request.Body)
		if err != nil {
			return
		}
		call := request.Method + " " + request.URL.Path
		var state struct{ State string }
		if json.Unmarshal(body, &state) == nil && state.State != "" && f.orders.Fault == call+" "+state.State {
			call = f.orders.Fault
		}
		if call == f.orders.Fault && f.orders.Kind == "lost" { // it is carried out, once, and nobody is told
			f.orders.Fault = ""
			f.answer(request, body)
			conn.Close()
			return
		}
		if f.fault(call, conn) {
			return
		}
		status, answer := f.answer(request, body)
		fmt.Fprintf(conn, "HTTP/1.1 %d \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n", status)
		if status != http.StatusNoContent {
			fmt.Fprintf(conn, "Content-Type: application/json\r\nContent-Length: %d\r\n", len(answer))
		}
		fmt.Fprintf(conn, "\r\n%s", answer)
	}
}

// rule is what the API description says of a request.
type rule struct {
	required, optional []string
	when               string // "before" or "after" the guest was started, "paused", or "" for any time
	do                 func(f *fake, body map[string]any) error
}

func rules() map[string]rule {
	return map[string]rule{
		"GET /": {},
		"PUT /machine-config": {required: []string{"vcpu_count", "mem_size_mib"}, when: "before",
			optional: []string{"smt", "cpu_template", "track_dirty_pages", "huge_pages"}, do: (*fake).machineConfig},
		"PUT /boot-source": {required: []string{"kernel_image_path"}, optional: []string{"initrd_path", "boot_args"}, when: "before",
			do: func(f *fake, b map[string]any) error { return openable(b, "kernel_image_path", "initrd_path") }},
		"PUT /drives/root": {required: []string{"drive_id", "is_root_device"}, when: "before",
			optional: []string{"path_on_host", "is_read_only", "cache_type", "io_engine"},
			do:       func(f *fake, b map[string]any) error { return openable(b, "path_on_host") }},
		"PUT /vsock": {required: []string{"guest_cid", "uds_path"}, optional: []string{"vsock_id"}, when: "before", do: (*fake).vsock},
		"PUT /network-interfaces/net": {required: []string{"iface_id", "host_dev_name"}, when: "before", do: (*fake).network,
			optional: []string{"guest_mac", "mtu", "rx_rate_limiter", "tx_rate_limiter"}},
		"PUT /entropy":         {optional: []string{"rate_limiter"}, when: "before"},
		"PUT /actions":         {required: []string{"action_type"}, when: "before", do: (*fake).start},
		"PATCH /vm":            {required: []string{"state"}, when: "after", do: (*fake).setState},
		"PUT /snapshot/create": {required: []string{"snapshot_path", "mem_file_path"}, optional: []string{"snapshot_type"}, when: "paused", do: (*fake).create},
		"PUT /snapshot/load": {required: []string{"snapshot_path", "mem_backend"}, when: "before", do: (*fake).load,
			optional: []string{"resume_vm", "track_dirty_pages", "enable_diff_snapshots", "network_overrides", "vsock_override", "clock_realtime"}},
	}
}

func (f *fake) answer(request *http.Request, body []byte) (int, string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	r, known := rules()[request.Method+" "+request.URL.Path]
	if !known {
		return refused("invalid request method and/or path: %s %s", request.Method, request.URL.Path)
	}
	fields := map[string]any{}
	if request.Method != http.MethodGet {
		if request.Header.Get("Content-Type") != "application/json" {
			return refused("content type %q", request.Header.Get("Content-Type"))
		}
		if err := json.Unmarshal(body, &fields); err != nil {
			return refused("body: %v", err)
		}
	}
	if err := r.check(f, fields); err != nil {
		return refused("%v", err)
	}
	if r.do != nil {
		if err := r.do(f, fields); err != nil {
			return refused("%v", err)
		}
	}
	f.puts[request.URL.Path] = body
	if request.Method == http.MethodGet {
		state := map[bool]string{true: "Running", false: "Paused"}[f.running]
		if !f.started {
			state = "Not started"
		}
		return 200, fmt.Sprintf(`{"id":"forkd","state":%q,"vmm_version":"1.16.1","app_name":"Firecracker"}`, state)
	}
	return http.StatusNoContent, ""
}

func refused(format string, args ...any) (int, string) {
	b, _ := json.Marshal(map[string]string{"fault_message": fmt.Sprintf(format, args...)})
	return http.StatusBadRequest, string(b)
}

func (r rule) check(f *fake, body map[string]any) error {
	for _, name := range r.required {
		if _, ok := body[name]; !ok {
			return fmt.Errorf("missing field `%s`", name)
		}
	}
	for name := range body {
		if !slices.Contains(r.required, name) && !slices.Contains(r.optional, name) {
			return fmt.Errorf("unknown field `%s`", name)
		}
	}
	switch {
	case r.when == "before" && f.started:
		return errors.New("the requested operation is not supported after starting the microVM")
	case r.when == "after" && !f.started, r.when == "paused" && !f.started:
		return errors.New("the requested operation is not supported before starting the microVM")
	case r.when == "paused" && f.running:
		return errors.New("the microVM is not paused")
	}
	return nil
}

func openable(body map[string]any, names ...string) error {
	for _, name := range names {
		path, ok := body[name].(string)
		if !ok {
			continue
		}
		file, err := os.Open(path)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		file.Close()
	}
	return nil
}

func (f *fake) machineConfig(b map[string]any) error {
	if n := b["vcpu_count"].(float64); n < 1 || n > 32 {
		return errors.New("the vCPU number is invalid")
	}
	return nil
}

func (f *fake) vsock(b map[string]any) error {
	if b["guest_cid"].(float64) < 3 {
		return errors.New("guest_cid is reserved")
	}
	return nil
}

func (f *fake) start(b map[string]any) error {
	if f.puts["/boot-source"] == nil {
		return errors.New("cannot start microvm without kernel configuration")
	}
	f.started, f.running = true, true
	os.Stdout.Write([]byte{probeguest.Ready})
	return f.listen()
}

func (f *fake) setState(b map[string]any) error {
	switch b["state"] {
	case "Paused":
		f.running = false
	case "Resumed":
		if !f.saved && f.ran { // as 1.16 is
			f.deaf = true
		}
		f.running, f.ran = true, true
		if f.saved { // the guest drops its connections, and tells nobody
			f.saved = false
			for _, c := range f.guests {
				c.SetLinger(0)
				c.Close()
			}
			f.guests = nil
		}
	default:
		return errors.New("unknown variant")
	}
	return nil
}

func (f *fake) create(b map[string]any) error {
	f.saved = true
	openMemory := func() error {
		m, err := os.OpenFile(b["mem_file_path"].(string), os.O_WRONLY|os.O_CREATE, 0o600)
		if err != nil {
			return fmt.Errorf("Cannot perform open on the memory backing file: %w", err)
		}
		return m.Close()
	}
	if slices.Contains(f.orders.Lacks, "state-only") {
		if err := openMemory(); err != nil {
			return err
		}
	}
	if err := os.WriteFile(b["snapshot_path"].(string), encodeState(f.tapName), 0o600); err != nil {
		return err
	}
	return openMemory()
}

func (f *fake) load(b map[string]any) error {
	if len(f.puts) > 0 {
		return errors.New("loading a microVM snapshot is not allowed after configuring boot-specific resources")
	}
	state, err := os.ReadFile(b["snapshot_path"].(string))
	if err != nil {
		return err
	}
	tap, ok := decodeState(state)
	if !ok {
		return errors.New("failed to restore from snapshot: CRC64 validation failed")
	}
	if err := f.openTap(tap); err != nil {
		return err
	}
	backend := b["mem_backend"].(map[string]any)
	if backend["backend_type"] != "File" {
		return errors.New("unknown backend")
	}
	memory, err := os.Open(backend["backend_path"].(string))
	if err != nil {
		return err
	}
	defer memory.Close()
	fi, err := memory.Stat()
	if err != nil {
		return err
	}
	if _, err := unix.Mmap(int(memory.Fd()), 0, int(fi.Size()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE); err != nil {
		return err
	}
	f.started = true
	f.running = b["resume_vm"] == true
	return f.listen()
}

// listen binds the guest's vsock socket.
func (f *fake) listen() error {
	l, err := net.Listen("unix", vsockSocket)
	if err != nil {
		return err
	}
	if f.orders.Agent {
		if err := f.startAgent(); err != nil {
			return err
		}
	}
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go f.connectGuest(conn)
		}
	}()
	return nil
}

func (f *fake) startAgent() (err error) {
	// Buffers as small as those of vsock: no more is ever on its way than a stream keeps.
	small := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) {
			_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 64<<10)
			_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUF, 64<<10)
		})
	}}
	if f.listener, err = small.Listen(context.Background(), "tcp", "127.0.0.1:0"); err != nil {
		return err
	}
	a, err := agent.New(agent.Options{Sandboxed: true})
	if err != nil {
		return err
	}
	go a.ServeStreams(context.Background(), f.listener)
	return nil
}

// connectGuest serves a connection as Firecracker does: it ends without a word when nobody listens in the guest.
func (f *fake) connectGuest(conn net.Conn) {
	defer conn.Close()
	in := bufio.NewReader(conn)
	line, err := in.ReadString('\n')
	if err != nil || !strings.HasPrefix(line, "CONNECT 1024") || f.listener == nil {
		return
	}
	for !f.hears() {
		time.Sleep(time.Millisecond)
	}
	f.mu.Lock()
	guest, err := net.Dial("tcp", f.listener.Addr().String())
	if err == nil {
		f.guests = append(f.guests, guest.(*net.TCPConn))
		_ = guest.(*net.TCPConn).SetWriteBuffer(64 << 10)
		_ = guest.(*net.TCPConn).SetReadBuffer(64 << 10)
	}
	f.mu.Unlock()
	if err != nil {
		return
	}
	fmt.Fprintf(conn, "OK 1073741824\n")
	go func() {
		io.Copy(guest, in)
		guest.Close()
	}()
	if _, err := io.Copy(conn, guest); err != nil {
		time.Sleep(time.Hour) // dropped by the guest: the host is not told
	}
}
