package arch

import (
	"bytes"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// maxLines is the length of a source file beyond which nobody reads it to the end. We aim for fewer than 500.
const maxLines = 600

// contents returns the tracked text files by name.
func contents(t *testing.T) map[string][]byte {
	t.Helper()
	dir := root(t)
	files := map[string][]byte{}
	for _, name := range tracked(t) {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.ContainsRune(b[:min(len(b), 8000)], 0) {
			files[name] = b
		}
	}
	return files
}

func TestFileLengths(t *testing.T) {
	source := []string{".go", ".py", ".sh", ".ts", ".S", ".c"}
	generated := regexp.MustCompile(`(?m)^(//|#) Code generated .* DO NOT EDIT\.$`)
	for name, b := range contents(t) {
		if !slices.Contains(source, filepath.Ext(name)) || generated.Match(b) {
			continue
		}
		if n := bytes.Count(b, []byte("\n")); n > maxLines {
			t.Errorf("%s has %d lines, want at most %d: split it by what its parts are about", name, n, maxLines)
		}
	}
}

// TestNoInit: what a program consists of is wired in cmd, where one can read it.
func TestNoInit(t *testing.T) {
	init := regexp.MustCompile(`(?m)^func init\(\)`)
	for name, b := range contents(t) {
		if strings.HasSuffix(name, ".go") && init.Match(b) {
			t.Errorf("%s has an init function: wire it explicitly", name)
		}
	}
}

// TestNoMachineOfOurs checks that nothing tracked points at the machine that it was written on.
func TestNoMachineOfOurs(t *testing.T) {
	patterns := []*regexp.Regexp{
		regexp.MustCompile(`/home/[a-z][a-z0-9_-]*/`),
		regexp.MustCompile(`/Users/[A-Za-z]`),
		regexp.MustCompile(`/tmp/[a-z]*_?jobs`),
	}
	// The user in the guest's image has that home.
	allowed := []string{"/home/user/"}
	if dir := root(t); strings.Count(dir, "/") > 1 {
		patterns = append(patterns, regexp.MustCompile(regexp.QuoteMeta(dir)+`\b`))
	}
	for _, host := range registryHosts(t) {
		patterns = append(patterns, regexp.MustCompile(`\b`+regexp.QuoteMeta(host)+`\b`))
	}
	for name, b := range contents(t) {
		for i, line := range bytes.Split(b, []byte("\n")) {
			for _, pattern := range patterns {
				if found := string(pattern.Find(line)); found != "" && !slices.Contains(allowed, found) {
					t.Errorf("%s:%d: %q is of the machine that it was written on; take it from a setting, or from what is there at run time", name, i+1, found)
				}
			}
		}
	}
}

// registryHosts returns the hosts that this machine gets its packages from, as its tools are set up. A fixed list would name them.
func registryHosts(t *testing.T) []string {
	t.Helper()
	settings := string(run(t, "go", "env", "GOPROXY"))
	for _, variable := range []string{"PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_INDEX_URL", "NPM_CONFIG_REGISTRY"} {
		settings += " " + os.Getenv(variable)
	}
	sources, _ := filepath.Glob("/etc/apt/sources.list.d/*")
	for _, name := range append(sources, "/etc/apt/sources.list") {
		b, _ := os.ReadFile(name)
		settings += " " + string(b)
	}
	var hosts []string
	for _, word := range regexp.MustCompile(`https?://[^\s,|"']+`).FindAllString(settings, -1) {
		u, err := url.Parse(word)
		if err != nil || !strings.Contains(u.Hostname(), ".") || strings.HasPrefix(u.Hostname(), "127.") {
			continue
		}
		hosts = append(hosts, u.Hostname())
	}
	slices.Sort(hosts)
	return slices.Compact(hosts)
}
