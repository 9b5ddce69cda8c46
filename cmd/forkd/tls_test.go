package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/forkd/forkd/client"
)

// writeCertificate writes a certificate for 127.0.0.1 with that serial number, and its key, in the place of those that are there.
func writeCertificate(t *testing.T, dir string, serial int64) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(serial), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	writeFile(t, dir+"/cert", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert})))
	writeFile(t, dir+"/key", string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})))
}

func writeFile(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

// servedDaemon is a daemon over the fake engine in a process of its own.
type servedDaemon struct {
	t   *testing.T
	dir string
	log *watched
	cmd *exec.Cmd

	ready  string // what it had logged when it was ready
	killed bool
}

// startServed starts one; it and its machines end with the test.
func startServed(t *testing.T, dir string, flags ...string) *servedDaemon {
	t.Helper()
	d := &servedDaemon{t: t, dir: dir, log: &watched{grew: make(chan struct{}, 1)}}
	d.cmd = forkdCommand(dir, "serve", append([]string{"--drain-timeout", "10s"}, flags...)...)
	d.cmd.Stderr = d.log
	if err := d.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if d.killed {
			return
		}
		_ = d.cmd.Process.Signal(syscall.SIGTERM)
		if err := d.cmd.Wait(); err != nil {
			t.Errorf("the daemon ended with %v:\n%s", err, d.log)
		}
		if out, err := forkdCommand(dir, "cleanup", "--all").CombinedOutput(); err != nil {
			t.Errorf("cleanup: %v\n%s", err, out)
		}
	})
	d.ready = d.await("msg=ready")
	return d
}

// await waits until the log has a text once more than when it was last awaited.
func (d *servedDaemon) await(text string) string {
	d.t.Helper()
	deadline := time.After(time.Minute)
	for {
		if all := d.log.String(); strings.Contains(all, text) {
			d.log.drop()
			return all
		}
		select {
		case <-d.log.grew:
		case <-deadline:
			d.t.Fatalf("the log has no %q:\n%s", text, d.log)
		}
	}
}

func (w *watched) drop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.text.Reset()
}

// hangUp has the daemon read its files again, and waits until it says what came of it.
func (d *servedDaemon) hangUp(want string) {
	d.t.Helper()
	if err := d.cmd.Process.Signal(syscall.SIGHUP); err != nil {
		d.t.Fatal(err)
	}
	d.await(want)
}

// TestTLSReload renews certificate and token of a daemon that works: nobody notices, and what can't be used changes nothing.
func TestTLSReload(t *testing.T) {
	dir := shortDir(t)
	writeCertificate(t, dir, 1)
	old, next := strings.Repeat("0", 32), strings.Repeat("1", 32)
	writeFile(t, dir+"/token", old)
	d := startServed(t, dir, "--listen", "127.0.0.1:0", "--tls-cert", dir+"/cert", "--tls-key", dir+"/key", "--token-file", dir+"/token")
	addr := d.listening()
	connect := func(token string) *client.Client {
		c, err := client.New(client.Config{URL: "https://" + addr, Token: token, CAFile: dir + "/cert"})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(c.Close)
		return c
	}
	c := connect(old)
	box := makeSandbox(t, c, dir)
	serial := func() int64 {
		t.Helper()
		conn, err := tls.Dial("tcp", addr, &tls.Config{InsecureSkipVerify: true})
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		return conn.ConnectionState().PeerCertificates[0].SerialNumber.Int64()
	}
	if got := serial(); got != 1 {
		t.Errorf("certificate %d, want 1", got)
	}
	running := make(chan error, 1)
	begun := make(chan struct{})
	go func() {
		close(begun)
		_, err := c.Exec(t.Context(), box, client.ExecRequest{Args: []string{"sleep", "2"}})
		running <- err
	}()
	<-begun
	events, err := c.Events(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer events.Close()

	writeCertificate(t, dir, 2)
	d.hangUp("SIGHUP: the token was read again")
	if got := serial(); got != 2 {
		t.Errorf("after SIGHUP: certificate %d, want 2", got)
	}
	if _, err := connect(old).Sandbox(t.Context(), box); err != nil {
		t.Errorf("a client that trusts the new certificate: %v", err)
	}
	stranger, err := client.New(client.Config{URL: "https://" + addr, Token: old})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stranger.Sandbox(t.Context(), box); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("a client that does not trust the certificate: %v", err)
	}
	for _, broken := range []string{"", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"} {
		writeFile(t, dir+"/cert", broken)
		d.hangUp("SIGHUP: the certificate stays as it was")
		if got := serial(); got != 2 {
			t.Errorf("with a broken file: certificate %d, want 2", got)
		}
	}
	if err := <-running; err != nil {
		t.Errorf("a command that ran meanwhile: %v", err)
	}

	// Another token: the one before and what was begun with it end; a file that can't be used changes nothing.
	writeCertificate(t, dir, 3)
	writeFile(t, dir+"/token", "short")
	d.hangUp("SIGHUP: the token stays as it was")
	c = connect(old)
	if _, err := c.Sandbox(t.Context(), box); err != nil {
		t.Errorf("the token, after one that can't be used: %v", err)
	}
	writeFile(t, dir+"/token", next)
	d.hangUp("SIGHUP: the token was read again")
	if _, err := c.Sandbox(t.Context(), box); !client.IsCode(err, "unauthorized") {
		t.Errorf("the token that was replaced: %v", err)
	}
	for range events.All() { // until the stream has ended with its token
	}
	if s, err := connect(next).Sandbox(t.Context(), box); err != nil || s.State != "running" {
		t.Errorf("the sandbox, with the new token: %+v, %v", s, err)
	}
}

// A daemon without TLS lives through SIGHUP too.
func TestHangup(t *testing.T) {
	d := startServed(t, shortDir(t), "--listen", "")
	d.hangUp("SIGHUP: there is nothing to read again")
}

// A daemon does not begin to listen where others can reach it unless it is protected.
func TestListenUnprotected(t *testing.T) {
	dir := shortDir(t)
	writeCertificate(t, dir, 1)
	writeFile(t, dir+"/token", strings.Repeat("0", 32))
	secure, token := []string{"--tls-cert", dir + "/cert", "--tls-key", dir + "/key"}, []string{"--token-file", dir + "/token"}
	for name, tt := range map[string]struct {
		flags []string
		want  string
	}{
		"nothing":        {nil, "there is no key"},
		"TLS only":       {secure, "there is no key"},
		"token only":     {token, "read along"},
		"half a pair":    {append(token, "--tls-cert", dir+"/cert"), "give both"},
		"a missing file": {append(token, "--tls-cert", dir+"/cert", "--tls-key", dir+"/none"), "no such file"},
	} {
		for _, addr := range []string{"0.0.0.0:0", "[::]:0", ":0"} {
			out, err := forkdCommand(dir, "serve", append([]string{"--listen", addr}, tt.flags...)...).CombinedOutput()
			if err == nil || !strings.Contains(string(out), tt.want) {
				t.Errorf("%s on %s: %v %s, want %q", name, addr, err, out, tt.want)
			}
		}
	}
	if files, _ := filepath.Glob(dir + "/run/*.sock"); len(files) > 0 {
		t.Errorf("left: %v", files)
	}
	_ = startServed(t, dir, append(append(secure, token...), "--listen", "0.0.0.0:0")...)
}

// shortDir is a directory with an image's ingredients, short enough for sockets.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "fk")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := writeImageFiles(dir); err != nil {
		t.Fatal(err)
	}
	return dir
}

// makeSandbox goes the way from an image to a sandbox.
func makeSandbox(t *testing.T, c *client.Client, dir string) string {
	t.Helper()
	if _, err := c.BuildImage(t.Context(), client.ImageBuildRequest{Name: "py", Kernel: dir + "/vmlinuz", Rootfs: dir + "/root.erofs"}, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := c.CreateSnapshot(t.Context(), client.SnapshotRequest{Tag: "py", Image: "py", MemMiB: 16}, nil); err != nil {
		t.Fatal(err)
	}
	boxes, err := c.Fork(t.Context(), client.ForkRequest{SnapshotTag: "py"})
	if err != nil {
		t.Fatal(err)
	}
	return boxes[0].ID
}

// listening is the TCP address that the daemon listens on.
func (d *servedDaemon) listening() string {
	d.t.Helper()
	m := listening.FindStringSubmatch(d.ready)
	if m == nil {
		d.t.Fatalf("no address in %s", d.ready)
	}
	return m[1]
}
