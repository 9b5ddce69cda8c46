package client

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/forkd/forkd/api"
)

// NetworkPolicy is what a sandbox may reach.
type NetworkPolicy = api.NetworkPolicy

// NetworkStatus is what a sandbox's network does at the moment, and what was tried in vain.
type NetworkStatus = api.NetworkStatus

// Network tells what a sandbox may reach, and what it tried in vain.
func (c *Client) Network(ctx context.Context, id string) (NetworkStatus, error) {
	var st NetworkStatus
	err := c.call(ctx, http.MethodGet, sandboxPath(id)+"/network", nil, &st)
	return st, err
}

// SetNetwork changes what a sandbox may reach, at once. Connections that are not allowed any more end.
func (c *Client) SetNetwork(ctx context.Context, id string, p NetworkPolicy) (NetworkStatus, error) {
	var st NetworkStatus
	err := c.call(ctx, http.MethodPut, sandboxPath(id)+"/network", p, &st)
	return st, err
}

// PortURL is where a daemon passes HTTP requests on to a sandbox's port. Over TCP they need the daemon's token.
func (c *Client) PortURL(id string, port int) string {
	return c.addr.base + sandboxPath(id) + "/ports/" + strconv.Itoa(port) + "/"
}

// HTTP is a client for PortURL: it knows the way to the daemon, and its token.
func (c *Client) HTTP() *http.Client {
	return &http.Client{Transport: authorized{c}, CheckRedirect: c.http.CheckRedirect}
}

type authorized struct{ c *Client }

// RoundTrip implements http.RoundTripper.
func (a authorized) RoundTrip(r *http.Request) (*http.Response, error) {
	if a.c.token != "" && strings.HasPrefix(r.URL.String(), a.c.addr.base+"/") {
		r = r.Clone(r.Context())
		r.Header.Set("Authorization", "Bearer "+a.c.token)
	}
	return a.c.http.Transport.RoundTrip(r)
}

const tunnelProtocol = "forkd-tcp"

// DialPort connects to a TCP port of a sandbox, through the daemon. The connection lasts beyond ctx.
func (c *Client) DialPort(ctx context.Context, id string, port int) (net.Conn, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.addr.base+sandboxPath(id)+"/tunnel/"+strconv.Itoa(port), nil)
	if err != nil {
		return nil, fmt.Errorf("port %d of sandbox %s: %w", port, id, err)
	}
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", tunnelProtocol)
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	conn, err := c.dial(ctx, req.URL)
	if err != nil {
		return nil, fmt.Errorf("daemon at %s: %w", c.addr, err)
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	if err := req.Write(conn); err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("daemon at %s: %w", c.addr, err)
	}
	reader := bufio.NewReader(conn)
	resp, err := http.ReadResponse(reader, req)
	switch {
	case err != nil:
		_ = conn.Close()
		return nil, fmt.Errorf("daemon at %s: %w", c.addr, err)
	case resp.StatusCode != http.StatusSwitchingProtocols:
		defer conn.Close()
		return nil, c.answerError(resp)
	case !stop():
		return nil, context.Cause(ctx)
	}
	return &tunnelConn{Conn: conn, reader: reader}, nil
}

// dial connects to the daemon.
func (c *Client) dial(ctx context.Context, to *url.URL) (net.Conn, error) {
	var d net.Dialer
	if c.addr.socket != "" {
		return d.DialContext(ctx, "unix", c.addr.socket)
	}
	port := to.Port()
	if to.Scheme == "https" {
		if port == "" {
			port = "443"
		}
		config := &tls.Config{ServerName: to.Hostname()}
		if t, ok := c.http.Transport.(*http.Transport); ok && t.TLSClientConfig != nil {
			config = t.TLSClientConfig.Clone()
			config.NextProtos = nil
		}
		return (&tls.Dialer{NetDialer: &d, Config: config}).DialContext(ctx, "tcp", net.JoinHostPort(to.Hostname(), port))
	}
	if port == "" {
		port = "80"
	}
	return d.DialContext(ctx, "tcp", net.JoinHostPort(to.Hostname(), port))
}

// tunnelConn is a connection of which some bytes were read ahead.
type tunnelConn struct {
	net.Conn
	reader *bufio.Reader
}

// Read implements net.Conn.
func (c *tunnelConn) Read(b []byte) (int, error) { return c.reader.Read(b) }

// CloseWrite tells the guest that no more comes.
func (c *tunnelConn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}
