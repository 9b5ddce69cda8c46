package arch

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

const module = "github.com/forkd/forkd"

// goPackage is what `go list` says about a package of this module.
type goPackage struct {
	ImportPath   string
	Dir          string
	Name         string
	Doc          string
	GoFiles      []string
	TestGoFiles  []string
	XTestGoFiles []string
	Imports      []string
	TestImports  []string
	XTestImports []string
	Deps         []string
}

// path is the package's place in the repository: "internal/vmm".
func (p goPackage) path() string { return place(p.ImportPath) }

// place turns an import path of this module into a place in the repository; others stay as they are.
func place(importPath string) string {
	if importPath == module {
		return "."
	}
	return strings.TrimPrefix(importPath, module+"/")
}

// ours says whether an import path belongs to this module.
func ours(importPath string) bool {
	return importPath == module || strings.HasPrefix(importPath, module+"/")
}

// root is the repository's directory.
func root(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs(filepath.Join("..", ".."))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "go.mod")); err != nil {
		t.Fatalf("the repository isn't at %s: %v", dir, err)
	}
	return dir
}

// run runs a command at the repository's root and returns its standard output.
func run(t *testing.T, name string, args ...string) []byte {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = root(t)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, stderr.String())
	}
	return out
}

// packages lists the packages of this module.
func packages(t *testing.T) []goPackage {
	t.Helper()
	fields := "-json=ImportPath,Dir,Name,Doc,GoFiles,TestGoFiles,XTestGoFiles,Imports,TestImports,XTestImports,Deps"
	decoder := json.NewDecoder(bytes.NewReader(run(t, "go", "list", "-e", fields, "./...")))
	var list []goPackage
	for {
		var p goPackage
		err := decoder.Decode(&p)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatalf("output of go list: %v", err)
		}
		list = append(list, p)
	}
	// The go command caches a test's result by the files that the test itself opened, not by what `go list` read.
	for _, p := range list {
		for _, name := range slices.Concat(p.GoFiles, p.TestGoFiles, p.XTestGoFiles) {
			if _, err := os.ReadFile(filepath.Join(p.Dir, name)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if len(list) < 5 {
		t.Fatalf("go list found %d packages, want the whole module", len(list))
	}
	return list
}

// tracked lists the files in Git, by their places; outside of a checkout it lists all files.
func tracked(t *testing.T) []string {
	t.Helper()
	dir := root(t)
	if _, err := os.Stat(filepath.Join(dir, ".git")); err != nil {
		t.Logf("not a Git checkout: every file is looked at")
		return walk(t, dir)
	}
	if _, err := os.Stat(filepath.Join(dir, ".git", "index")); err != nil {
		t.Logf("a change of the list of files won't make the go command run this test again: %v", err)
	}
	names := strings.Split(strings.TrimRight(string(run(t, "git", "ls-files", "-z")), "\x00"), "\x00")
	// A file that was deleted and not committed yet is still listed.
	return slices.DeleteFunc(names, func(name string) bool {
		info, err := os.Lstat(filepath.Join(dir, name))
		return err != nil || !info.Mode().IsRegular()
	})
}

func walk(t *testing.T, dir string) []string {
	t.Helper()
	var names []string
	err := filepath.WalkDir(dir, func(path string, entry os.DirEntry, err error) error {
		if err == nil && entry.Type().IsRegular() {
			name, _ := filepath.Rel(dir, path)
			names = append(names, name)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}
