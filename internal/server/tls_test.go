package server

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/forkd/forkd/client"
	"github.com/forkd/forkd/internal/keys"
)

// writePair writes a certificate for 127.0.0.1 with that serial number, and its key.
func writePair(t *testing.T, certFile, keyFile string, serial int64) {
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
	for file, block := range map[string]*pem.Block{certFile: {Type: "CERTIFICATE", Bytes: cert}, keyFile: {Type: "PRIVATE KEY", Bytes: der}} {
		if file == "" {
			continue
		}
		if err := os.WriteFile(file+".new", pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(file+".new", file); err != nil {
			t.Fatal(err)
		}
	}
}

// A daemon that speaks TLS follows its certificate's files, and what can't be used changes nothing.
func TestTLS(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	certFile, keyFile := filepath.Join(dir, "cert"), filepath.Join(dir, "key")
	if _, err := LoadCertificate(certFile, keyFile, slog.New(slog.DiscardHandler)); err == nil {
		t.Error("a certificate that is not there was loaded")
	}
	writePair(t, certFile, keyFile, 1)
	cert, err := LoadCertificate(certFile, keyFile, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ring := newRing(t, keys.Limit{})
	_, token := newKey(t, ring, keys.Request{Name: "k", Tenant: "acme", Scope: keys.Read})
	f := newFixture(t, func(c *Config) { c.Keys = ring })
	plain, err := ListenTCP("127.0.0.1:0", Protection{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- f.server.Serve(ctx, nil, cert.Listener(plain), 0) }()
	defer func() {
		stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}()
	serial := func() int64 {
		t.Helper()
		cert.mu.Lock()
		cert.checked = time.Time{} // as if it had been a while
		cert.mu.Unlock()
		conn, err := tls.Dial("tcp", plain.Addr().String(), &tls.Config{InsecureSkipVerify: true})
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		return conn.ConnectionState().PeerCertificates[0].SerialNumber.Int64()
	}
	c, err := client.New(client.Config{URL: "https://" + plain.Addr().String(), Token: token, CAFile: certFile})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Sandboxes(t.Context(), false); err != nil {
		t.Errorf("a client that trusts it: %v", err)
	}
	if resp, err := http.Get("http://" + plain.Addr().String() + "/healthz"); err == nil && resp.StatusCode == http.StatusOK {
		t.Error("it answers without TLS")
	}
	if _, err := tls.Dial("tcp", plain.Addr().String(), &tls.Config{InsecureSkipVerify: true, MaxVersion: tls.VersionTLS11}); err == nil {
		t.Error("it speaks TLS 1.1")
	}
	if got := serial(); got != 1 {
		t.Errorf("certificate %d, want 1", got)
	}
	writePair(t, certFile, keyFile, 2)
	if got := serial(); got != 2 {
		t.Errorf("after a renewal: certificate %d, want 2", got)
	}
	writePair(t, certFile, "", 3) // its key is not there yet
	if got := serial(); got != 2 {
		t.Errorf("half renewed: certificate %d, want 2", got)
	}
	if err := cert.Reload(); err == nil {
		t.Error("half a pair was loaded")
	}
	writePair(t, certFile, keyFile, 4)
	if err := cert.Reload(); err != nil {
		t.Error(err)
	}
	if got := serial(); got != 4 {
		t.Errorf("after Reload: certificate %d, want 4", got)
	}
}
