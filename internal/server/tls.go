package server

import (
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"
)

// certificateAge is how long a certificate is used before its files are looked at again.
const certificateAge = time.Second

// Certificate is a TLS certificate that follows its files: whoever renews them need not tell the daemon. What can't be read, such as a pair that is
// half replaced, changes nothing.
type Certificate struct {
	certFile, keyFile string
	log               *slog.Logger

	mu      sync.Mutex
	cert    *tls.Certificate
	stamp   [2]fileStamp
	checked time.Time
}

// fileStamp tells a file from one that took its place.
type fileStamp struct {
	modified time.Time
	size     int64
	inode    os.FileInfo // compared by os.SameFile
}

func stampOf(path string) (fileStamp, error) {
	info, err := os.Stat(path)
	if err != nil {
		return fileStamp{}, err
	}
	return fileStamp{modified: info.ModTime(), size: info.Size(), inode: info}, nil
}

func (a fileStamp) same(b fileStamp) bool {
	return a.modified.Equal(b.modified) && a.size == b.size && os.SameFile(a.inode, b.inode)
}

// LoadCertificate reads a certificate with its chain, and its key, from PEM files.
func LoadCertificate(certFile, keyFile string, log *slog.Logger) (*Certificate, error) {
	c := &Certificate{certFile: certFile, keyFile: keyFile, log: log}
	if err := c.Reload(); err != nil {
		return nil, err
	}
	return c, nil
}

// Reload reads the files again. On an error what was read before stays in use.
func (c *Certificate) Reload() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.reloadLocked()
}

func (c *Certificate) reloadLocked() error {
	c.checked = time.Now()
	stamp, err := c.stamps() // before reading: what changes meanwhile is read again
	if err != nil {
		return fmt.Errorf("TLS certificate: %w", err)
	}
	cert, err := tls.LoadX509KeyPair(c.certFile, c.keyFile)
	if err != nil {
		return fmt.Errorf("TLS certificate %s with key %s: %w", c.certFile, c.keyFile, err)
	}
	c.cert, c.stamp = &cert, stamp
	return nil
}

func (c *Certificate) stamps() (out [2]fileStamp, err error) {
	for i, path := range []string{c.certFile, c.keyFile} {
		if out[i], err = stampOf(path); err != nil {
			return out, err
		}
	}
	return out, nil
}

// current is the certificate of a connection that begins now.
func (c *Certificate) current(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.checked) < certificateAge {
		return c.cert, nil
	}
	c.checked = time.Now()
	now, err := c.stamps()
	if err == nil && now[0].same(c.stamp[0]) && now[1].same(c.stamp[1]) {
		return c.cert, nil
	}
	if err == nil {
		err = c.reloadLocked()
	}
	if err != nil {
		c.log.Warn("the new certificate can't be used: the old one stays", "error", err)
		return c.cert, nil
	}
	c.log.Info("the certificate was read again", "file", c.certFile)
	return c.cert, nil
}

// Listener makes TLS of what a listener accepts.
func (c *Certificate) Listener(l net.Listener) net.Listener {
	return tls.NewListener(l, &tls.Config{GetCertificate: c.current, MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}})
}
