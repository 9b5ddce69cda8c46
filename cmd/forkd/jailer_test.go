package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestJailerRefused: a daemon that can't start every machine through the jailer that it was given doesn't start.
func TestJailerRefused(t *testing.T) {
	says := func(version string) string {
		path := filepath.Join(t.TempDir(), "program")
		if err := os.WriteFile(path, fmt.Appendf(nil, "#!/bin/sh\necho '%s'\n", version), 0o755); err != nil {
			t.Fatal(err)
		}
		return path
	}
	text := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(text, []byte("Jailer v1.16.1"), 0o755); err != nil {
		t.Fatal(err)
	}
	fire, good := says("Firecracker v1.16.1"), says("Jailer v1.16.1")
	if os.Geteuid() != 0 {
		t.Skip("all of these are refused to whoever is not root, for that reason")
	}
	for _, tt := range []struct {
		name string
		args []string
		want string
	}{
		{"auto", []string{"--jailer", good}, "give --engine firecracker as well"},
		{"qemu", []string{"--jailer", good, "--engine", "qemu"}, "with --engine qemu"},
		{"emulation", []string{"--jailer", good, "--engine", "firecracker", "--accel", "tcg"}, "machines are emulated"},
		{"not confined", []string{"--jailer", good, "--engine", "firecracker", "--confine", "off"}, "the jailer needs root"},
		{"a text file", []string{"--jailer", text, "--engine", "firecracker"}, "is it Firecracker's jailer?"},
		{"no file", []string{"--jailer", "/no/such", "--engine", "firecracker"}, "no such file"},
		{"another version", []string{"--jailer", says("Jailer v1.15.1"), "--engine", "firecracker"}, "use those of one release"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			args := append([]string{"serve", "--listen", "", "--networking", "off", "--firecracker", fire, "--data", dir + "/data", "--run", dir + "/run", "--cache", dir + "/cache"}, tt.args...)
			var out, errs bytes.Buffer
			if code := run(t.Context(), args, strings.NewReader(""), &out, &errs, nil, fakeParts()); code != exitUsage || !strings.Contains(errs.String(), tt.want) {
				t.Errorf("exit code %d, %q, want %d and %q", code, errs.String(), exitUsage, tt.want)
			}
		})
	}
}

// TestCleanupNeedsNoJailer: what is left over goes, whatever jailer a daemon was told of.
func TestCleanupNeedsNoJailer(t *testing.T) {
	dir := t.TempDir()
	var out, errs bytes.Buffer
	args := []string{"cleanup", "--all", "--networking", "off", "--jailer", "/no/such", "--data", dir + "/data", "--run", dir + "/run", "--cache", dir + "/cache"}
	if code := run(t.Context(), args, strings.NewReader(""), &out, &errs, nil, fakeParts()); code != 0 {
		t.Errorf("exit code %d: %s", code, errs.String())
	}
}
