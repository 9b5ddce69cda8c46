package server

import (
	"crypto/ed25519"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/internal/sandbox"
	"github.com/forkd/forkd/internal/transfer"
)

func TestPack(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	got := f.do(t, "GET", "/v1/snapshots/py/pack", "")
	if got.status != 200 || got.body != stubPack || got.header.Get("Content-Type") != octets || got.header.Get("Content-Disposition") != "attachment; filename=py.forkd" {
		t.Errorf("= %d %q %v", got.status, got.body, got.header)
	}
	f.do(t, "GET", "/v1/snapshots/py/pack", "", "Forkd-Signature", base64.StdEncoding.EncodeToString([]byte("sig")))
	if diff := cmp.Diff([]string{"", "sig"}, f.signatures); diff != "" {
		t.Errorf("signatures (-want +got):\n%s", diff)
	}
	if got := f.do(t, "GET", "/v1/snapshots/py/pack/contents", ""); got.status != 200 || got.body != `{"id": "s1"}` {
		t.Errorf("contents = %d %q", got.status, got.body)
	}
	if got := f.do(t, "HEAD", "/v1/snapshots/py/pack", ""); got.status != 200 || len(f.signatures) != 2 {
		t.Errorf("HEAD = %d, and made %d packs", got.status, len(f.signatures)-2)
	}
}

// TestPackFails holds that a pack which breaks off can't be taken for a whole one.
func TestPackFails(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.packBreaks = true
	resp, err := http.Get(f.http.URL + "/v1/snapshots/py/pack")
	if err == nil {
		_, err = io.ReadAll(resp.Body)
		resp.Body.Close()
	}
	if err == nil {
		t.Error("the answer came to a regular end")
	}
	f = newFixture(t)
	f.fail = &sandbox.Error{Code: sandbox.CodeSnapshotCorrupt, Message: "chunk 3"}
	if got := f.do(t, "GET", "/v1/snapshots/py/pack", ""); got.status != 422 || got.code() != "snapshot_corrupt" {
		t.Errorf("before the first byte = %d %s", got.status, got.body)
	}
	if got := f.do(t, "HEAD", "/v1/snapshots/py/pack", ""); got.status != 422 {
		t.Errorf("HEAD = %d", got.status)
	}
}

func newSigner(t *testing.T) (ed25519.PublicKey, string) {
	t.Helper()
	public, _, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKIXPublicKey(public)
	if err != nil {
		t.Fatal(err)
	}
	return public, base64.StdEncoding.EncodeToString(der)
}

func TestUnpack(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	public, header := newSigner(t)
	got := f.do(t, "POST", "/v1/snapshots/unpack?tag=new", stubPack, "Content-Type", octets, "Forkd-Require-Signer", header)
	var res api.UnpackResult
	if err := json.Unmarshal([]byte(got.body), &res); err != nil || got.status != 201 {
		t.Fatalf("= %d %s", got.status, got.body)
	}
	if res.Snapshot.Tag != "new" || !res.NewImage || res.ImageID != "i1" || len(res.NewSnapshots) != 1 || res.PresentSnapshots == nil || res.SignedBy == nil || *res.SignedBy != header {
		t.Errorf("answer = %s", got.body)
	}
	if got := f.do(t, "POST", "/v1/snapshots/unpack", stubPack, "Content-Type", ""); got.status != 201 || !strings.Contains(got.body, `"signed_by":null`) {
		t.Errorf("without a tag, a key or a type = %d %s", got.status, got.body)
	}
	if diff := cmp.Diff([]transfer.UnpackRequest{{Tag: "new", Signers: []ed25519.PublicKey{public}}, {}}, f.unpacks); diff != "" {
		t.Errorf("requests (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{stubPack, stubPack}, f.unpacked); diff != "" {
		t.Errorf("bodies (-want +got):\n%s", diff)
	}
}

// TestUnpackStreams holds that progress comes while the pack is still on its way.
func TestUnpackStreams(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.unpack = func(r io.Reader, p func(sandbox.Progress)) (transfer.Unpacked, error) {
		b := make([]byte, 1)
		for i := range int64(3) {
			if _, err := io.ReadFull(r, b); err != nil {
				return transfer.Unpacked{}, err
			}
			p(sandbox.Progress{Step: "unpack", Detail: string(b), Done: i, Total: 3})
		}
		_, err := io.Copy(io.Discard, r)
		return transfer.Unpacked{Snapshot: stubSnapshot()}, err
	}
	body, w := io.Pipe()
	req, err := http.NewRequestWithContext(t.Context(), "POST", f.http.URL+"/v1/snapshots/unpack", body)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Accept", ndjson)
	go func() { _, _ = w.Write([]byte("a")) }()
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	dec := json.NewDecoder(resp.Body)
	next := func() api.ProgressEvent {
		t.Helper()
		var e api.ProgressEvent
		if err := dec.Decode(&e); err != nil {
			t.Fatal(err)
		}
		return e
	}
	for _, letter := range []string{"a", "b", "c"} {
		if got := next(); got.Detail != letter {
			t.Errorf("progress = %+v, want %s", got, letter)
		}
		if letter != "c" {
			_, _ = w.Write([]byte{letter[0] + 1}) // after the last one's progress came
		}
	}
	w.Close()
	if got := next(); got.Event != api.ProgressEventEventDone || got.Unpacked == nil || got.Unpacked.Snapshot.Tag != "py" {
		t.Errorf("last = %+v", got)
	}
}

// TestUnpackRefusedEarly holds that a client that sends everything before it reads sees why its pack is refused, and one that asks first
// sends nothing.
func TestUnpackRefusedEarly(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.fail = &sandbox.Error{Code: sandbox.CodeSnapshotExists, Message: "the tag is in use"}
	dial := func() net.Conn {
		t.Helper()
		conn, err := net.Dial("tcp", f.http.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	const size = 20 << 20
	conn := dial()
	req, _ := http.NewRequest("POST", f.http.URL+"/v1/snapshots/unpack?tag=t", io.LimitReader(repeat('x'), size))
	req.ContentLength = size
	if err := req.Write(conn); err != nil {
		t.Fatalf("send all of it: %v", err)
	}
	if got := readAnswer(t, conn, req); got.status != 409 || got.code() != "snapshot_exists" {
		t.Errorf("= %d %s, want 409", got.status, got.body)
	}

	conn = dial()
	fmt.Fprintf(conn, "POST /v1/snapshots/unpack?tag=t HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\nExpect: 100-continue\r\n\r\n", size)
	if got := readAnswer(t, conn, nil); got.status != 409 {
		t.Errorf("asked first: = %d %s, want 409 and no 100", got.status, got.body)
	}
}

// TestUnpackClientLeaves holds that the domain hears of a client that leaves in the middle.
func TestUnpackClientLeaves(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	begun, ended := make(chan struct{}), make(chan error, 1)
	f.unpack = func(r io.Reader, _ func(sandbox.Progress)) (transfer.Unpacked, error) {
		_, err := io.ReadFull(r, make([]byte, 5))
		if err == nil {
			close(begun)
			_, err = io.Copy(io.Discard, r)
		}
		ended <- err
		return transfer.Unpacked{}, err
	}
	conn, err := net.Dial("tcp", f.http.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(conn, "POST /v1/snapshots/unpack?tag=t HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nhello")
	<-begun
	conn.Close()
	select {
	case err := <-ended:
		if err == nil {
			t.Error("the pack came to a regular end")
		}
	case <-time.After(20 * time.Second):
		t.Error("the domain still waits for more")
	}
	counted := `forkd_http_requests_total{code="499",method="POST",route="/v1/snapshots/unpack"} 1`
	deadline := time.Now().Add(10 * time.Second)
	for !strings.Contains(f.do(t, "GET", "/metrics", "").body, counted) { // counted once the handler has returned
		if time.Now().After(deadline) {
			t.Fatal("it is not counted as a client that left")
		}
	}
}

func TestPruneImages(t *testing.T) {
	t.Parallel()
	if got := newFixture(t).do(t, "POST", "/v1/images/prune", ""); got.status != 200 || !strings.Contains(got.body, `{"removed":[{`) {
		t.Errorf("= %d %s", got.status, got.body)
	}
}
