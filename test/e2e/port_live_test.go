package e2e

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/net/websocket"

	"github.com/forkd/forkd/client"
)

// portServer is a guest's web server that behaves in every way: it echoes frames of a WebSocket, streams, takes and gives much, hangs, and breaks off.
const portServer = `
import base64, hashlib, http.server, queue, struct, threading
pieces, came, left = queue.Queue(), queue.Queue(), queue.Queue()
def exactly(f, n):
    data = f.read(n)
    if len(data) < n: raise ConnectionError
    return data
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *a): pass
    def do_GET(self): getattr(self, "get_" + self.path.split("/")[1])()
    def head(self, code, **headers):
        self.send_response(code)
        for k, v in headers.items(): self.send_header(k.replace("_", "-"), v)
        self.end_headers()
    def get_ws(self):
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.head(101, Upgrade="websocket", Connection="Upgrade", Sec_WebSocket_Accept=base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
        self.close_connection = True
        while True:
            kind, size = exactly(self.rfile, 2)
            size &= 127
            if size == 126: size, = struct.unpack("!H", exactly(self.rfile, 2))
            elif size == 127: size, = struct.unpack("!Q", exactly(self.rfile, 8))
            mask = exactly(self.rfile, 4)
            data = exactly(self.rfile, size)
            data = (int.from_bytes(data, "big") ^ int.from_bytes((mask * (size // 4 + 1))[:size], "big")).to_bytes(size, "big")
            head = bytes([kind]) + (bytes([size]) if size < 126 else struct.pack("!BH", 126, size) if size < 65536 else struct.pack("!BQ", 127, size))
            self.wfile.write(head + data)
            if kind & 15 == 8: return
    def get_sse(self):
        self.head(200, Content_Type="text/event-stream", Transfer_Encoding="chunked")
        while piece := pieces.get():
            piece = b"data: " + piece.encode() + b"\n\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece)); self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")
    def get_much(self):
        size = int(self.path.split("/")[2])
        self.head(200, Content_Length=str(size))
        for i in range(size >> 16): self.wfile.write(bytes([i & 255]) * 65536)
    def get_hang(self):
        came.put("came")
        try: self.rfile.read(1)
        except OSError: pass
        left.put("left")
        self.close_connection = True
    def get_early(self): self.close_connection = True
    def get_cut(self):
        self.head(200, Content_Length="100")
        self.wfile.write(b"the beginning"); self.wfile.flush()
        self.close_connection = True
    def do_POST(self):
        digest, size = hashlib.sha256(), 0
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while n := int(self.rfile.readline(), 16):
                digest.update(exactly(self.rfile, n)); size += n; self.rfile.readline()
            self.rfile.readline()
        else:
            size = int(self.headers["Content-Length"])
            for _ in range(size >> 16): digest.update(exactly(self.rfile, 65536))
        body = ("%d %s" % (size, digest.hexdigest())).encode()
        self.head(200, Content_Length=str(len(body)))
        self.wfile.write(body)
class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 64
    def handle_error(self, *a): pass
threading.Thread(target=Server(("", 8080), Handler).serve_forever, daemon=True).start()
def echo():
    l = socket.create_server(("", 7))
    def one(c):
        data = b""
        while chunk := c.recv(65536): data += chunk
        c.sendall(data); c.close()
    while True: threading.Thread(target=one, args=(l.accept()[0],), daemon=True).start()
threading.Thread(target=echo, daemon=True).start()
`

// TestPortsLive passes through the proxy what real programs send: WebSockets, streams, much, and servers that behave badly.
func TestPortsLive(t *testing.T) {
	needVM(t)
	n := newInternet(t)
	d := ownDaemon(t, n.setup())
	g := d.fork1(withNetwork(nothing))
	g.py(portServer)
	t.Run("WebSocket", func(t *testing.T) { g.checkWebSocket(t) })
	t.Run("stream", func(t *testing.T) { g.checkStream(t) })
	t.Run("much", func(t *testing.T) { g.checkMuch(t) })
	t.Run("bad servers", func(t *testing.T) { g.checkBadServers(t) })
	t.Run("command line", func(t *testing.T) { g.checkPortForward(t); g.checkAllowByCommandLine(t) })
}

// checkWebSocket sends frames of all sizes both ways.
func (g *guest) checkWebSocket(t *testing.T) {
	conn, err := net.Dial("unix", g.d.socket())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	config, err := websocket.NewConfig("ws://forkd/v1/sandboxes/"+g.ID+"/ports/8080/ws", "http://forkd")
	if err != nil {
		t.Fatal(err)
	}
	ws, err := websocket.NewClient(config, conn)
	if err != nil {
		t.Fatal(err)
	}
	for _, size := range []int{0, 5, 125, 126, 70_000, 1 << 20} {
		text := strings.Repeat("w", size)
		if err := websocket.Message.Send(ws, text); err != nil {
			t.Fatal(err)
		}
		var back string
		if err := websocket.Message.Receive(ws, &back); err != nil || back != text {
			t.Fatalf("of %d characters %d came back: %v", size, len(back), err)
		}
	}
	if err := ws.WriteClose(1000); err != nil {
		t.Error(err)
	}
	if rest, err := io.ReadAll(conn); err != nil || string(rest) != "\x88\x02\x03\xe8" {
		t.Errorf("after its end: %q, %v", rest, err)
	}
}

// checkStream has each piece arrive before the next one is made.
func (g *guest) checkStream(t *testing.T) {
	resp, err := g.d.client.HTTP().Get(g.d.client.PortURL(g.ID, 8080) + "sse")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	for _, word := range []string{"one", "two", "three"} {
		g.py("pieces.put('" + word + "')")
		if !lines.Scan() || lines.Text() != "data: "+word || !lines.Scan() {
			t.Fatalf("piece %q: %q, %v", word, lines.Text(), lines.Err())
		}
	}
	g.py("pieces.put('')")
	if lines.Scan() || lines.Err() != nil {
		t.Errorf("after the end: %q, %v", lines.Text(), lines.Err())
	}
}

// checkMuch sends and fetches more than any buffer holds.
func (g *guest) checkMuch(t *testing.T) {
	const size = 4 << 20
	data := bytes.Repeat([]byte("0123456789abcdef"), size/16)
	want := fmt.Sprintf("%d %x", size, sha256.Sum256(data))
	url := g.d.client.PortURL(g.ID, 8080)
	for name, body := range map[string]io.Reader{"of known length": bytes.NewReader(data), "in chunks": io.MultiReader(bytes.NewReader(data))} {
		resp, err := g.d.client.HTTP().Post(url+"upload", "application/octet-stream", body)
		if err != nil {
			t.Fatal(err)
		}
		got, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if string(got) != want {
			t.Errorf("a body %s: the guest got %s, want %s", name, got, want)
		}
	}
	resp, err := g.d.client.HTTP().Get(url + fmt.Sprintf("much/%d", size))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if got, err := io.ReadAll(resp.Body); err != nil || len(got) != size || got[65536] != 1 {
		t.Errorf("%d bytes came of %d: %v", len(got), size, err)
	}
}

// checkBadServers: a client that gives up is told to the guest, and a guest that breaks off to the client.
func (g *guest) checkBadServers(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	req, _ := http.NewRequestWithContext(ctx, http.MethodGet, g.d.client.PortURL(g.ID, 8080)+"hang", nil)
	given := make(chan error, 1)
	go func() {
		resp, err := g.d.client.HTTP().Do(req)
		if err == nil {
			resp.Body.Close()
		}
		given <- err
	}()
	if got := g.py("came.get(timeout=30)"); got != "'came'" {
		t.Fatalf("the request has not come to the guest: %s", got)
	}
	cancel()
	if err := <-given; err == nil {
		t.Error("a server that hangs answered")
	}
	if got := g.py("left.get(timeout=30)"); got != "'left'" {
		t.Errorf("the guest is not told that its client has left: %s", got)
	}

	if _, err := tryGetPort(g, 8080, "early"); err == nil || !strings.Contains(err.Error(), "guest_unreachable") {
		t.Errorf("a server that closes without an answer: %v", err)
	}
	resp, err := g.d.client.HTTP().Get(g.d.client.PortURL(g.ID, 8080) + "cut")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if got, err := io.ReadAll(resp.Body); err == nil || !strings.HasPrefix(string(got), "the begin") {
		t.Errorf("an answer that breaks off: %q, %v", got, err)
	}
}

// checkPortForward runs the command: many connections at once, half-closed ones, and Ctrl-C.
func (g *guest) checkPortForward(t *testing.T) {
	cmd := exec.Command(g.d.lab.bin, "port-forward", g.ID, "0:8080", "0:7", "0:9")
	cmd.Env = append(os.Environ(), "FORKD_URL="+g.d.socket())
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(stdout)
	var at []string
	for range 3 {
		if !lines.Scan() {
			break
		}
		local, _, _ := strings.Cut(lines.Text(), " -> ")
		at = append(at, local)
	}
	if len(at) != 3 {
		_ = cmd.Process.Kill()
		t.Fatalf("port-forward printed %q: %v", at, &stderr)
	}
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			text := strings.Repeat(fmt.Sprintf("connection %d ", i), 10_000)
			conn, err := net.Dial("tcp", at[1])
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			go func() { _, _ = io.WriteString(conn, text); _ = conn.(*net.TCPConn).CloseWrite() }()
			if back, err := io.ReadAll(conn); err != nil || string(back) != text {
				t.Errorf("connection %d: %d bytes came back of %d: %v", i, len(back), len(text), err)
			}
			resp, err := http.Get("http://" + at[0] + "/much/65536")
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			if n, err := io.Copy(io.Discard, resp.Body); n != 65536 || err != nil {
				t.Errorf("connection %d: %d bytes by HTTP: %v", i, n, err)
			}
		})
	}
	all.Wait()
	refused, err := net.Dial("tcp", at[2])
	if err != nil {
		t.Fatal(err)
	}
	defer refused.Close()
	if rest, err := io.ReadAll(refused); len(rest) > 0 {
		t.Errorf("a port on which nobody listens says %q, %v", rest, err)
	}
	open, err := net.Dial("tcp", at[1]) // and stays open
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	err = cmd.Wait()
	if err != nil || !strings.Contains(stderr.String(), "port 9 of sandbox "+g.ID) || strings.Count(stderr.String(), "\n") > 2 {
		t.Errorf("Ctrl-C: %v\n%s", err, &stderr)
	}
	if rest, err := io.ReadAll(open); len(rest) > 0 {
		t.Errorf("what was open says %q, %v", rest, err)
	}
}

// checkAllowByCommandLine gives a policy on the command line, and changes it there.
func (g *guest) checkAllowByCommandLine(t *testing.T) {
	t.Helper()
	d := g.d
	id := d.must("fork", "--tag", pyTag, "-q", "--allow", goodAddr+":8080/tcp", "--allow", "*.good.test:443")
	var st client.NetworkStatus
	d.mustJSON(&st, "net", id)
	if st.Policy.Mode != "allow" || len(st.Policy.Allow) != 2 {
		t.Errorf("fork --allow: %+v", st.Policy)
	}
	for addr, want := range map[string]string{goodAddr: "True", badAddr: "False"} {
		code := fmt.Sprintf("__import__('socket').socket().connect_ex((%q, 8080)) == 0", addr)
		if got := d.must("eval", id, code); got != want {
			t.Errorf("%s can be reached: %s, want %s", addr, got, want)
		}
	}
	wantWords(t, "net", d.must("net", id), badAddr, "tcp", "8080", "*.good.test:443")
	wantWords(t, "net --set", d.must("net", id, "--set", "none"), "none")
	d.must("kill", id)
}
