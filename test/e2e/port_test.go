package e2e

import (
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/forkd/forkd/client"
)

// getPort asks a web server in a guest through the daemon.
func getPort(g *guest, port int, path string) string {
	g.d.t.Helper()
	body, err := tryGetPort(g, port, path)
	if err != nil {
		g.d.t.Fatalf("port %d of %v: %v", port, g, err)
	}
	return body
}

func tryGetPort(g *guest, port int, path string) (string, error) {
	resp, err := g.d.client.HTTP().Get(g.d.client.PortURL(g.ID, port) + path)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != 200 {
		err = fmt.Errorf("%s: %s", resp.Status, body)
	}
	return string(body), err
}

// TestPorts reaches servers in a guest that may itself reach nothing.
func TestPorts(t *testing.T) {
	needVM(t)
	n := newInternet(t)
	d := ownDaemon(t, n.setup())
	g := d.fork1(withNetwork(nothing))
	serveInGuest(g, 8080)
	g.py(`
def echo():
    l = socket.create_server(("", 7))
    while True:
        c, _ = l.accept()
        data = b""
        while chunk := c.recv(4096): data += chunk
        c.sendall(data); c.close()
threading.Thread(target=echo, daemon=True).start()`)

	if got := getPort(g, 8080, "a//b/../c?x=%2F"); got != "GET /a//b/../c?x=%2F" {
		t.Errorf("the guest was asked for %q", got)
	}
	if _, err := tryGetPort(g, 9, ""); err == nil || !strings.Contains(err.Error(), "guest_unreachable") {
		t.Errorf("a port on which nobody listens: %v", err)
	}
	ctx, cancel := d.limited()
	defer cancel()
	conn, err := d.client.DialPort(ctx, g.ID, 7)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	text := strings.Repeat("through the tunnel ", 10_000)
	if _, err := io.WriteString(conn, text); err != nil {
		t.Fatal(err)
	}
	if err := conn.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	back, err := io.ReadAll(conn)
	if err != nil || string(back) != text {
		t.Errorf("%d bytes came back of %d: %v", len(back), len(text), err)
	}
	if _, err := d.client.DialPort(ctx, "sbnone", 7); !client.IsCode(err, "sandbox_not_found") {
		t.Errorf("the port of a sandbox that is not there: %v", err)
	}
	past := slotAddr(g) + ":8080"
	n.in(n.host, func() error {
		if c, err := net.DialTimeout("tcp", past, time.Second); err == nil {
			c.Close()
			t.Error("the guest's port can be reached past the daemon")
		}
		return nil
	})
}
