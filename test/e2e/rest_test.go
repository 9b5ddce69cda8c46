package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"

	"github.com/forkd/forkd/api"
)

// answer is what the daemon said to a request that was made by hand.
type answer struct {
	status int
	header http.Header
	body   string
	err    api.Error // of an answer that is not a success
}

func (a answer) String() string { return fmt.Sprintf("%d %.500s", a.status, strings.TrimSpace(a.body)) }

// rest makes a request as no client of ours would.
func (d *daemon) rest(method, path string, body io.Reader) (answer, error) {
	ctx, cancel := d.limited()
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, "http://forkd"+path, body)
	if err != nil {
		return answer{}, err
	}
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", d.socket())
	}}
	defer transport.CloseIdleConnections()
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		return answer{}, err
	}
	a := answer{status: resp.StatusCode, header: resp.Header, body: string(data)}
	if resp.StatusCode/100 != 2 {
		if err := json.Unmarshal(data, &a.err); err != nil {
			return a, fmt.Errorf("the answer %v is not JSON: %w", a, err)
		}
	}
	return a, nil
}

// refusal is an answer that a request shall get.
type refusal struct {
	status int
	code   string
	says   string // in the message
}

// refuses makes a request and checks that it is refused in that way.
func (d *daemon) refuses(method, path string, body io.Reader, want refusal) {
	d.t.Helper()
	got, err := d.rest(method, path, body)
	if err != nil {
		d.t.Errorf("%s %s: %v", method, path, err)
		return
	}
	if got.status != want.status || got.err.Code != want.code || !strings.Contains(got.err.Error, want.says) {
		d.t.Errorf("%s %s: got %v, want %d %s with %q", method, path, got, want.status, want.code, want.says)
	}
}
