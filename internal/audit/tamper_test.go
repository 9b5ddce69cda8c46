package audit

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// TestVerifyFindsEveryTampering changes each line of a record in each of its fields, drops each, doubles each, and swaps each with each: all of it is
// found. The record goes over several files.
func TestVerifyFindsEveryTampering(t *testing.T) {
	source := t.TempDir()
	l, err := Open(source, Options{FileBytes: 1500})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 10 {
		if err := l.Append(Entry{RequestID: fmt.Sprint("r", i), Principal: "key 1 (ci)", Tenant: "acme", Remote: "127.0.0.1:1", Action: "POST /v1/sandboxes",
			Target: fmt.Sprint("sb", i), Params: []byte(`{"n":1}`), Status: 201, Outcome: "ok", DurationMS: 1.5}); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	names, err := files(source)
	if err != nil || len(names) < 2 {
		t.Fatalf("files: %v, %v", names, err)
	}
	var lines [][]byte // of all files
	var counts []int
	for _, name := range names {
		data, err := os.ReadFile(filepath.Join(source, name))
		if err != nil {
			t.Fatal(err)
		}
		own := bytes.SplitAfter(data, []byte("\n"))
		own = own[:len(own)-1]
		counts = append(counts, len(own))
		lines = append(lines, own...)
	}
	check := func(what string, changed [][]byte, want bool) {
		t.Helper()
		dir := t.TempDir()
		head, err := os.ReadFile(filepath.Join(source, headFile))
		if err != nil {
			t.Fatal(err)
		}
		write := func(name string, data []byte) {
			if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		write(headFile, head)
		rest := changed
		for i, name := range names {
			n := min(counts[i], len(rest))
			if i == len(names)-1 {
				n = len(rest)
			}
			write(name, bytes.Join(rest[:n], nil))
			rest = rest[n:]
		}
		report, err := Verify(dir, VerifyOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if found := len(report.Problems) > 0; found != want {
			t.Errorf("%s: found %v, want %v", what, found, want)
		}
	}
	check("nothing", lines, false)
	for i, line := range lines {
		for _, field := range []string{`"seq":`, `"time":"`, `"request_id":"`, `"principal":"`, `"tenant":"`, `"remote":"`, `"action":"`, `"target":"`, `"params":{"`, `"status":`, `"outcome":"`, `"duration_ms":`, `"prev":"`} {
			at := bytes.Index(line, []byte(field)) + len(field)
			if at < len(field) {
				t.Fatalf("line %s has no %s", line, field)
			}
			other := bytes.Clone(line)
			if other[at] = '7'; line[at] == '7' {
				other[at] = '8'
			}
			check(fmt.Sprintf("line %d changed in %s", i+1, field), slices.Replace(slices.Clone(lines), i, i+1, other), true)
		}
		check(fmt.Sprintf("line %d dropped", i+1), slices.Delete(slices.Clone(lines), i, i+1), true)
		check(fmt.Sprintf("line %d twice", i+1), slices.Insert(slices.Clone(lines), i, line), true)
		for j := range i {
			swapped := slices.Clone(lines)
			swapped[i], swapped[j] = swapped[j], swapped[i]
			check(fmt.Sprintf("lines %d and %d swapped", j+1, i+1), swapped, true)
		}
	}
}
