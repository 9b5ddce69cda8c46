package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/forkd/forkd/api"
)

// Config says which daemon to use. The zero value is right for most programs.
type Config struct {
	// URL is http://host:port, https://host:port, unix:///path or a socket's path. Empty: FORKD_URL, else this host's socket.
	URL string
	// Token is sent over TCP. Empty: FORKD_TOKEN.
	Token string
	// CAFile has the certificates (PEM) of who vouches for an https daemon. Empty: FORKD_CACERT, else those the host trusts.
	CAFile string
	// Getenv is asked for FORKD_URL, FORKD_TOKEN, FORKD_CACERT and XDG_RUNTIME_DIR. Nil: os.Getenv.
	Getenv func(string) string
}

// Client speaks to one daemon.
type Client struct {
	addr  address
	token string
	http  *http.Client
}

// New returns a client. It does not connect: that the daemon is there shows with the first request.
func New(cfg Config) (*Client, error) {
	if cfg.Getenv == nil {
		cfg.Getenv = os.Getenv
	}
	if cfg.URL == "" {
		cfg.URL = cfg.Getenv("FORKD_URL")
	}
	if cfg.URL == "" {
		cfg.URL = findSocket(cfg.Getenv)
	}
	if cfg.Token == "" {
		cfg.Token = strings.TrimSpace(cfg.Getenv("FORKD_TOKEN"))
	}
	addr, err := parseAddress(cfg.URL)
	if err != nil {
		return nil, err
	}
	transport := &http.Transport{
		DialContext:         (&net.Dialer{Timeout: 10 * time.Second}).DialContext,
		MaxIdleConnsPerHost: 128, // programs that fork many sandboxes talk to all of them at once
		IdleConnTimeout:     time.Minute,
		DisableCompression:  true,
		// A pack that is not wanted is refused before it is sent.
		ExpectContinueTimeout: 5 * time.Second,
	}
	if transport.TLSClientConfig, err = trust(cfg); err != nil {
		return nil, err
	}
	if addr.socket != "" {
		transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", addr.socket)
		}
	}
	return &Client{addr: addr, token: cfg.Token, http: &http.Client{Transport: transport}}, nil
}

// Address is where requests go, as FORKD_URL takes it.
func (c *Client) Address() string { return c.addr.String() }

// Close closes idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Version asks which daemon this is.
func (c *Client) Version(ctx context.Context) (api.Version, error) {
	var v api.Version
	err := c.call(ctx, http.MethodGet, "/version", nil, &v)
	return v, err
}

// Health asks whether the daemon answers. It needs no token.
func (c *Client) Health(ctx context.Context) error {
	var h api.Health
	return c.call(ctx, http.MethodGet, "/healthz", nil, &h)
}

// Metrics returns the daemon's metrics in Prometheus' text format.
func (c *Client) Metrics(ctx context.Context) ([]byte, error) { return c.raw(ctx, "/metrics") }

// Int returns a pointer to v, for optional fields.
func Int(v int) *int { return &v }

// Seconds returns a pointer to d in seconds, for optional fields.
func Seconds(d time.Duration) *float64 {
	secs := d.Seconds()
	return &secs
}

type keyOfIdempotency struct{}

// WithIdempotencyKey makes a creating call (Fork, CreateSnapshot, Branch and others) repeatable: called again with the same key and the
// same request it gets the first call's result and creates nothing. Such a call goes on in the daemon when the client leaves.
func WithIdempotencyKey(ctx context.Context, key string) context.Context {
	return context.WithValue(ctx, keyOfIdempotency{}, key)
}

// send makes a request and returns the answer whatever its status is. The caller closes its body.
func (c *Client) send(ctx context.Context, method, path string, body any, header http.Header) (*http.Response, error) {
	if body == nil {
		return c.do(ctx, method, path, nil, header)
	}
	data, err := json.Marshal(body)
	if err != nil {
		return nil, fmt.Errorf("encode the request: %w", err)
	}
	header = header.Clone()
	if header == nil {
		header = http.Header{}
	}
	header.Set("Content-Type", "application/json")
	return c.do(ctx, method, path, bytes.NewReader(data), header)
}

// do is send with a body of any kind.
func (c *Client) do(ctx context.Context, method, path string, body io.Reader, header http.Header) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, c.addr.base+path, body)
	if err != nil {
		return nil, fmt.Errorf("request %s: %w", path, err)
	}
	for name, values := range header {
		req.Header[name] = values
	}
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	if key, ok := ctx.Value(keyOfIdempotency{}).(string); ok && method == http.MethodPost {
		req.Header.Set("Idempotency-Key", key)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, c.unreachable(ctx, err)
	}
	return resp, nil
}

// call makes a request and decodes a successful answer into out, which may be nil.
func (c *Client) call(ctx context.Context, method, path string, body, out any) error {
	resp, err := c.send(ctx, method, path, body, nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode/100 != 2 {
		return c.answerError(resp)
	}
	if out == nil || resp.StatusCode == http.StatusNoContent {
		return nil
	}
	return c.decode(ctx, resp.Body, out)
}

// decode reads the JSON of a successful answer.
func (c *Client) decode(ctx context.Context, r io.Reader, out any) error {
	err := json.NewDecoder(r).Decode(out)
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return c.unreachable(ctx, io.ErrUnexpectedEOF)
	}
	return &Error{Code: CodeUnexpected, Message: fmt.Sprintf("%s did not answer as a forkd daemon does: %v", c.addr, err), Hint: "check FORKD_URL", Err: err}
}

// raw gets a document that isn't JSON.
func (c *Client) raw(ctx context.Context, path string) ([]byte, error) {
	resp, err := c.send(ctx, http.MethodGet, path, nil, nil)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode/100 != 2 {
		return nil, c.answerError(resp)
	}
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, c.unreachable(ctx, err)
	}
	return data, nil
}

// Progress is a step of long work.
type Progress = api.ProgressEvent

// stream makes a request whose answer is a line of progress at a time, and returns the last one.
func (c *Client) stream(ctx context.Context, path string, body any, progress func(Progress)) (Progress, error) {
	resp, err := c.send(ctx, http.MethodPost, path, body, http.Header{"Accept": {"application/x-ndjson"}})
	if err != nil {
		return Progress{}, err
	}
	defer resp.Body.Close()
	if resp.StatusCode/100 != 2 {
		return Progress{}, c.answerError(resp)
	}
	dec := json.NewDecoder(resp.Body)
	for {
		var event Progress
		if err := dec.Decode(&event); err != nil {
			if ctx.Err() != nil {
				return Progress{}, context.Cause(ctx)
			}
			return Progress{}, c.unreachable(ctx, io.ErrUnexpectedEOF)
		}
		switch event.Event {
		case api.ProgressEventEventDone:
			return event, nil
		case api.ProgressEventEventError:
			e := errorOf(*event.Error)
			e.Status = resp.StatusCode
			return Progress{}, e
		default:
			if progress != nil {
				progress(event)
			}
		}
	}
}
