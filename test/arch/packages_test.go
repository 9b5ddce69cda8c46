package arch

import (
	"go/parser"
	"go/token"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestPackageDocs(t *testing.T) {
	for _, p := range packages(t) {
		doc := p.Doc
		if len(p.GoFiles) == 0 {
			doc = testDoc(t, p)
		}
		want := "Package " + p.Name + " "
		if p.Name == "main" {
			want = "Command " + path.Base(p.ImportPath) + " "
		}
		if !strings.HasPrefix(doc, want) {
			t.Errorf("%s: its doc comment begins with %q, want %q and what it is for and is not for", p.path(), doc, want+"…")
		}
	}
}

// testDoc returns the doc comment of a package that has test files only.
func testDoc(t *testing.T, p goPackage) string {
	t.Helper()
	for _, name := range slices.Concat(p.TestGoFiles, p.XTestGoFiles) {
		file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, name), nil, parser.ParseComments|parser.PackageClauseOnly)
		if err != nil {
			t.Fatal(err)
		}
		if file.Doc != nil {
			return file.Doc.Text()
		}
	}
	return ""
}

func TestPackageNames(t *testing.T) {
	vague := []string{"util", "utils", "common", "helper", "helpers", "misc", "base", "shared", "lib", "types"}
	for _, p := range packages(t) {
		for _, name := range append(strings.Split(p.path(), "/"), p.Name) {
			if slices.Contains(vague, name) {
				t.Errorf("%s: %q says nothing about what is in it; name a package for what it provides", p.path(), name)
			}
		}
	}
}
