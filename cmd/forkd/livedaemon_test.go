package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/forkd/forkd/internal/audit"
)

// liveDaemon is a daemon over the fake engine in this process, with the CLI's own wiring, that answers on TCP.
type liveDaemon struct {
	t    *testing.T
	dir  string
	url  string
	log  *watched
	http *http.Client
	asks int
	seen map[string]audit.Entry
	read int64 // bytes of the audit record that are in seen
}

// watched is the daemon's stderr.
type watched struct {
	mu   sync.Mutex
	text bytes.Buffer
	grew chan struct{}
}

func (w *watched) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	select {
	case w.grew <- struct{}{}:
	default:
	}
	return w.text.Write(b)
}

func (w *watched) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.text.String()
}

// newLiveDaemon makes the directories and files that a daemon needs, short enough for sockets.
func newLiveDaemon(t *testing.T) *liveDaemon {
	t.Helper()
	dir, err := os.MkdirTemp("", "fk")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := writeImageFiles(dir); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(dir+"/data", 0o700); err != nil {
		t.Fatal(err)
	}
	return &liveDaemon{t: t, dir: dir, log: &watched{grew: make(chan struct{}, 1)}, http: &http.Client{Timeout: time.Minute}, seen: map[string]audit.Entry{}}
}

var listening = regexp.MustCompile(`msg=ready .*listen=(\S+) `)

// start runs the daemon until the end of the test; its machines end with it.
func (d *liveDaemon) start(flags ...string) {
	d.t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan int, 1)
	args := append([]string{"serve", "--data", d.dir + "/data", "--run", d.dir + "/run", "--cache", d.dir + "/cache", "--drain-timeout", "10s", "--log-level", "debug"}, flags...)
	env := []string{"HOME=" + d.dir, "PATH=" + os.Getenv("PATH")}
	go func() { done <- run(ctx, args, strings.NewReader(""), io.Discard, d.log, env, fakeParts()) }()
	d.t.Cleanup(func() {
		stop()
		if code := <-done; code != 0 {
			d.t.Errorf("the daemon ended with %d:\n%s", code, d.log)
		}
		if out, err := forkdCommand(d.dir, "cleanup", "--all").CombinedOutput(); err != nil {
			d.t.Errorf("cleanup: %v\n%s", err, out)
		}
	})
	deadline := time.After(time.Minute)
	for {
		if m := listening.FindStringSubmatch(d.log.String()); m != nil {
			d.url = "http://" + m[1]
			return
		}
		select {
		case <-d.log.grew:
		case code := <-done:
			done <- code
			d.t.Fatalf("the daemon did not get ready:\n%s", d.log)
		case <-deadline:
			d.t.Fatalf("the daemon is not ready after a minute:\n%s", d.log)
		}
	}
}

// answered is what came back.
type answered struct {
	status   int
	body     []byte
	header   http.Header
	id, path string // of the request
}

// request asks for something with a credential of the matrix. Of an answer that does not end the beginning is read.
func (d *liveDaemon) request(cred, method, path, body string, header map[string]string) answered {
	d.t.Helper()
	d.asks++
	ctx, cancel := context.WithCancel(d.t.Context())
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, d.url+path, strings.NewReader(body))
	if err != nil {
		d.t.Fatal(err)
	}
	out := answered{id: fmt.Sprintf("m-%d", d.asks), path: req.URL.Path}
	req.Header.Set("X-Request-Id", out.id)
	if token := tokenOf(cred); token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	for name, value := range header {
		req.Header.Set(name, value)
	}
	resp, err := d.http.Do(req)
	if err != nil {
		d.t.Fatalf("%s %s with %s: %v", method, path, cred, err)
	}
	defer resp.Body.Close()
	out.status, out.header = resp.StatusCode, resp.Header
	if resp.Header.Get("Content-Type") == "text/event-stream" {
		return out
	}
	if out.body, err = io.ReadAll(resp.Body); err != nil {
		d.t.Fatalf("%s %s with %s: %v", method, path, cred, err)
	}
	return out
}

// must makes a request that succeeds.
func (d *liveDaemon) must(status int, cred, method, path, body string) answered {
	d.t.Helper()
	got := d.request(cred, method, path, body, nil)
	if got.status != status {
		d.t.Fatalf("%s %s %s with %s = %d %s, want %d", method, path, body, cred, got.status, got.body, status)
	}
	return got
}

func (d *liveDaemon) decode(a answered, into any) {
	d.t.Helper()
	if err := json.Unmarshal(a.body, into); err != nil {
		d.t.Fatalf("%v in %s", err, a.body)
	}
}

// auditLine waits for the line of a request in the audit record: it is written when the answer has been.
func (d *liveDaemon) auditLine(id string) audit.Entry {
	d.t.Helper()
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		d.readAudit()
		if e, ok := d.seen[id]; ok {
			return e
		}
	}
	d.t.Errorf("request %s has no line in the audit record", id)
	return audit.Entry{}
}

// readAudit reads what is new in the record.
func (d *liveDaemon) readAudit() {
	d.t.Helper()
	f, err := os.Open(d.recordFile())
	if err != nil {
		d.t.Fatal(err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.NewSectionReader(f, d.read, 1<<40))
	if err != nil {
		d.t.Fatal(err)
	}
	data = data[:bytes.LastIndexByte(data, '\n')+1]
	d.read += int64(len(data))
	for line := range bytes.Lines(data) {
		var e audit.Entry
		if err := json.Unmarshal(line, &e); err != nil {
			d.t.Fatalf("audit line %s: %v", line, err)
		}
		d.seen[e.RequestID] = e
	}
}

// recordFile is the one file of the audit record.
func (d *liveDaemon) recordFile() string {
	d.t.Helper()
	names, err := filepath.Glob(d.dir + "/data/audit/audit-*.jsonl")
	if err != nil || len(names) != 1 {
		d.t.Fatalf("files of the record: %v, %v", names, err)
	}
	return names[0]
}
