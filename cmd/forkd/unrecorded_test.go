package main

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"

	"github.com/forkd/forkd/api"
)

// secretFields are the fields of requests whose values are nobody's business but the guest's. A field of a new route that has such a name is tried as
// well; one with another name belongs here.
var secretFields = []string{"env", "secrets", "stdin", "token", "password"}

// TestSecretsUnrecorded puts a word into every field of every route that may hold a secret, well-formed and not, and into everything of a request that is
// no parameter: the word is in no log, no audit record, no metric and no error, and what was given as secrets in no file.
func TestSecretsUnrecorded(t *testing.T) {
	const word = "hunter2-marker-5a7e"
	doc, err := openapi3.NewLoader().LoadFromData(api.Spec)
	if err != nil {
		t.Fatal(err)
	}
	m := newMatrix(t)
	tried := map[string]int{}
	for _, path := range slices.Sorted(maps.Keys(doc.Paths.Map())) {
		for method, op := range doc.Paths.Value(path).Operations() {
			m.tryWord(word, method, op, tried)
		}
	}
	for _, op := range []string{"fork", "createWorkspace", "createSnapshot", "execCommand", "diffSnapshot", "forkSandbox"} {
		if tried[op] == 0 {
			t.Errorf("%s has no field that was tried: is the document read in the right way?", op)
		}
	}
	figures := m.must(200, "host-read", "GET", "/metrics", "")
	if strings.Contains(string(figures.body), word) {
		t.Error("the word is in the metrics")
	}
	if at := strings.Index(m.log.String(), word); at >= 0 {
		t.Errorf("the word is in the log: …%s…", around(m.log.String(), at))
	}
	err = filepath.WalkDir(m.dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return nil
		}
		data, err := os.ReadFile(path)
		at := strings.Index(string(data), word+"-secrets")
		if in := strings.Contains(path, "/audit/"); at < 0 && in {
			at = strings.Index(string(data), word)
		}
		if err == nil && at >= 0 {
			t.Errorf("the word is in %s: …%s…", path, around(string(data), at))
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

func around(text string, at int) string {
	return text[max(at-200, 0):min(at+100, len(text))]
}

// tryWord makes the requests of one operation with a word in them.
func (m *matrix) tryWord(word, method string, op *openapi3.Operation, tried map[string]int) {
	x := tries()[op.OperationID]
	fresh := "nothing0"
	if x.fresh != nil && x.body == "" {
		fresh = x.fresh(m)
	}
	real := strings.NewReplacer("SANDBOX", m.sandbox, "TAG", "acmetag", "WORK", "acmework", "%s", fresh)
	cred := "admin"
	if access, _ := op.Extensions["x-forkd-access"].(string); strings.HasPrefix(access, "host-") {
		cred = "host-admin"
	}
	ask := func(path, body string, header map[string]string) {
		got := m.request(cred, method, path, body, header)
		if got.status >= 400 && strings.Contains(string(got.body), word) {
			m.t.Errorf("%s %s %s: the answer tells it: %d %s", method, path, body, got.status, got.body)
		}
		m.auditLineOrNot(op.OperationID, got.id)
	}
	// A key that is wrong, and what is meant for a guest.
	header := map[string]string{"Forkd-Guest-Authorization": "Bearer " + word, "Cookie": "session=" + word, "Proxy-Authorization": "Basic " + word}
	maps.Copy(header, x.extra)
	wrong := maps.Clone(header)
	wrong["Authorization"] = "Bearer fk_" + word
	if op.OperationID == "proxyPort" {
		ask(real.Replace(x.path)+"reset/"+word+"?token="+word, "", header)
		ask(real.Replace(x.path)+"reset/"+word+"?token="+word, "", wrong)
	}
	ask(real.Replace(x.path), real.Replace(x.body), wrong)
	if op.RequestBody == nil || op.RequestBody.Value.Content["application/json"] == nil {
		return
	}
	for name := range op.RequestBody.Value.Content["application/json"].Schema.Value.Properties {
		if !slices.Contains(secretFields, name) {
			continue
		}
		tried[op.OperationID]++
		value := word + "-" + name
		values := []string{fmt.Sprintf("%q", value), fmt.Sprintf(`[%q]`, value), fmt.Sprintf(`{"A": %q}`, value), fmt.Sprintf(`{"A": {"B": [%q]}}`, value),
			fmt.Sprintf(`{"A": %q, "B": 1}`, value), fmt.Sprintf(`{"A": %q`, value), fmt.Sprintf(`{"A\u0000": %q}`, value), fmt.Sprintf(`{"A": "%s\u0000"}`, value),
			fmt.Sprintf(`{"": %q}`, value), fmt.Sprintf(`{"A": %q, "A": %q}`, value, value), fmt.Sprintf(`{"A": "%s%s"}`, value, strings.Repeat("x", 70_000))}
		for i, v := range values {
			for _, spelled := range []string{name, strings.ToUpper(name), strings.ReplaceAll(name, "s", "ſ")} {
				if spelled != name && i > 2 {
					continue
				}
				body := map[string]json.RawMessage{}
				if x.body != "" {
					if err := json.Unmarshal([]byte(strings.ReplaceAll(real.Replace(x.body), "nothing0", m.name("u"))), &body); err != nil {
						m.t.Fatal(err)
					}
				}
				text := "{"
				for n, other := range body {
					text += fmt.Sprintf("%q: %s, ", n, other)
				}
				ask(real.Replace(x.path), text+fmt.Sprintf("%q: %s}", spelled, v), header)
			}
		}
	}
}

// auditLineOrNot waits for the line of a request that is to have one.
func (m *matrix) auditLineOrNot(op, id string) {
	if op != "getHealth" {
		m.auditLine(id)
	}
}
