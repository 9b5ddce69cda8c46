package arch

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestRule checks that rules find what they are for: a rule that never fires looks the same as a tree that keeps it.
func TestRule(t *testing.T) {
	tests := []struct {
		name string
		rule rule
		pkg  goPackage
		want []string
	}{
		{
			name: "direct import",
			rule: rule{from: []string{"internal/a"}, deny: []string{"internal/b/..."}},
			pkg:  goPackage{ImportPath: module + "/internal/a", Imports: []string{"os", module + "/internal/b/c"}},
			want: []string{"internal/b/c"},
		},
		{
			name: "the tree's own root",
			rule: rule{from: []string{"internal/a"}, deny: []string{"internal/b/..."}},
			pkg:  goPackage{ImportPath: module + "/internal/a", Imports: []string{module + "/internal/b"}},
			want: []string{"internal/b"},
		},
		{
			name: "a name that only begins alike",
			rule: rule{from: []string{"internal/a"}, deny: []string{"internal/b/...", "internal/c"}},
			pkg:  goPackage{ImportPath: module + "/internal/a", Imports: []string{module + "/internal/bb", module + "/internal/c/d"}},
		},
		{
			name: "through another package",
			rule: rule{from: []string{"cmd/..."}, deny: []string{"testing"}, deep: true},
			pkg:  goPackage{ImportPath: module + "/cmd/x", Deps: []string{"testing"}},
			want: []string{"testing"},
		},
		{
			name: "through another package, where that is allowed",
			rule: rule{from: []string{"cmd/..."}, deny: []string{"testing"}},
			pkg:  goPackage{ImportPath: module + "/cmd/x", Deps: []string{"testing"}},
		},
		{
			name: "in tests",
			rule: rule{from: []string{"..."}, deny: []string{"net/http"}, tests: true},
			pkg:  goPackage{ImportPath: module + "/api", TestImports: []string{"net/http"}},
			want: []string{"net/http"},
		},
		{
			name: "in tests, where that is allowed",
			rule: rule{from: []string{"..."}, deny: []string{"net/http"}},
			pkg:  goPackage{ImportPath: module + "/api", XTestImports: []string{"net/http"}},
		},
		{
			name: "anything of ours",
			rule: rule{from: []string{"internal/a"}, deny: []string{"..."}, allow: []string{"internal/ok"}, deep: true},
			pkg:  goPackage{ImportPath: module + "/internal/a", Imports: []string{"os", "net/http", "golang.org/x/sys/unix", module + "/internal/ok"}, Deps: []string{module + "/api"}},
			want: []string{"api"},
		},
		{
			name: "an exception",
			rule: rule{from: []string{"..."}, except: []string{"internal/store/..."}, deny: []string{"database/sql"}},
			pkg:  goPackage{ImportPath: module + "/internal/store", Imports: []string{"database/sql"}},
		},
		{
			name: "a package's own tests",
			rule: rule{from: []string{"internal/a"}, deny: []string{"..."}, tests: true},
			pkg:  goPackage{ImportPath: module + "/internal/a", XTestImports: []string{module + "/internal/a"}},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, tt.rule.denied(tt.pkg)); diff != "" {
				t.Errorf("denied imports (-want +got):\n%s", diff)
			}
		})
	}
}

// TestRulesName checks that every rule is about something that exists, or is on its way.
func TestRulesName(t *testing.T) {
	coming := []string{"internal/vmm/firecracker/...", "internal/guest/agentclient/...", "cmd/..."}
	all := packages(t)
	for _, r := range rules() {
		for _, pattern := range append(append([]string{}, r.from...), r.except...) {
			if matches(coming, pattern) {
				continue
			}
			found := false
			for _, p := range all {
				found = found || matches([]string{pattern}, p.path())
			}
			if !found {
				t.Errorf("the rule %q is about %s, which doesn't exist: was it moved?", r.name, pattern)
			}
		}
	}
}
