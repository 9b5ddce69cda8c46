package bench

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/forkd/forkd/client"
)

// stubDaemon takes packs out and in. What a pack holds beside its own snapshot comes without a tag.
type stubDaemon struct {
	chain []string // ids by depth
	known map[string]string
	tags  map[string]string // ids
	calls []string
}

func (d *stubDaemon) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	tag, what, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/v1/snapshots/"), "/")
	switch {
	case r.Method == http.MethodPost && tag == "unpack":
		body, _ := io.ReadAll(r.Body)
		tag = r.URL.Query().Get("tag")
		var fresh []string
		for _, id := range d.chain {
			if _, ok := d.known[id]; !ok {
				fresh = append(fresh, `"`+id+`"`)
			}
			d.known[id] = ""
			if "pack of "+id == string(body) {
				d.tags[tag] = id
				break
			}
		}
		fmt.Fprintf(w, `{"snapshot": {}, "new_snapshots": [%s]}`, strings.Join(fresh, ","))
		what = "unpack"
	case strings.HasPrefix(r.URL.Path, "/v1/sandboxes"):
		fmt.Fprint(w, `{"sandboxes": [{"id": "child"}], "pong": true}`)
		return
	case d.tags[tag] == "":
		http.Error(w, `{"code": "snapshot_not_found", "error": "no such tag"}`, http.StatusNotFound)
	case r.Method == http.MethodDelete:
		clear(d.tags)
		clear(d.known)
		what = "delete"
	case what == "pack":
		fmt.Fprint(w, "pack of "+d.tags[tag])
	case what == "info":
		fmt.Fprintf(w, `{"tag": %q, "resident": false}`, tag)
		return
	}
	d.calls = append(d.calls, what+" "+tag)
}

// TestReloadedChainHasBothEnds holds that both ends of a chain that was taken away and in again can be forked by their tags.
func TestReloadedChainHasBothEnds(t *testing.T) {
	d := &stubDaemon{chain: []string{"sn0", "sn1", "sn2"}, known: map[string]string{}, tags: map[string]string{"base": "sn0", "tip": "sn2"}}
	server := httptest.NewServer(d)
	defer server.Close()
	c, err := client.New(client.Config{URL: server.URL, Token: "none"})
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", t.TempDir())
	ch := &chain{c: c, base: "base", tip: "tip", r: &ChainReport{}, opt: ChainOptions{Depth: 2, Progress: func(string, ...any) {}}}
	if err := ch.reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]string{"base": "sn0", "tip": "sn2"}, d.tags); diff != "" {
		t.Errorf("tags (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"pack base", "pack tip", "delete base", "unpack base", "unpack tip"}, d.calls); diff != "" {
		t.Errorf("what was asked for (-want +got):\n%s", diff)
	}
	if left, _ := os.ReadDir(os.Getenv("TMPDIR")); len(left) > 0 {
		t.Errorf("files are left: %v", left)
	}
}
