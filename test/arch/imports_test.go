package arch

import (
	"slices"
	"strings"
	"testing"
)

// rule forbids what the packages of from import themselves, or through others where deep is set.
type rule struct {
	name   string
	from   []string // places; "x/..." means x and all beneath
	except []string // of from
	deny   []string // places and import paths of other modules
	allow  []string // of deny
	deep   bool
	tests  bool // the rule is for test files too
	why    string
}

// engines are the packages that run machines.
func engines() []string { return []string{"internal/vmm/qemu/...", "internal/vmm/firecracker/..."} }

// rules is the dependency rule of the architecture: domain → contracts ← engines.
func rules() []rule {
	return []rule{
		{
			name: "the contract stands alone",
			from: []string{"internal/vmm"}, deny: []string{"..."}, deep: true, tests: true,
			why: "internal/vmm is plain types that everybody imports",
		},
		{
			name: "confinement knows no machines",
			from: []string{"internal/confine/...", "internal/limits"}, deny: []string{"..."}, allow: []string{"internal/confine/...", "internal/limits"}, deep: true,
			why: "internal/confine starts programs and internal/limits bounds them, whatever they are",
		},
		{
			name: "engines know only what is beneath them",
			from: engines(), deny: []string{"internal/sandbox/...", "internal/snapshot/...", "internal/store/...", "internal/image/...", "internal/server/...", "api/...", "client/..."}, deep: true,
			why: "an engine runs machines; what they are for is decided above",
		},
		{
			name: "the conformance suite knows no engine",
			from: []string{"internal/vmm/vmmtest/..."}, deny: engines(), deep: true, tests: true,
			why: "engines call the suite, not the other way round",
		},
		{
			name: "the domain knows no engine and no HTTP",
			from: []string{"internal/sandbox/..."}, deny: append(engines(), "net/http", "internal/server/...", "api/...", "client/..."), tests: true,
			why: "the domain imports contracts; cmd wires engines and servers to it",
		},
		{
			name: "storage knows nothing of what it is for",
			from: []string{"internal/memory/...", "internal/snapshot/...", "internal/image/...", "internal/store/..."},
			deny: append(engines(), "internal/sandbox/...", "internal/server/...", "net/http"), tests: true,
			why: "the domain uses them",
		},
		{
			name: "keys know nothing of what they open",
			from: []string{"internal/keys/..."}, deny: append(engines(), "internal/sandbox/...", "internal/server/...", "net/http"), tests: true,
			why: "the server asks them, and tells the domain who asks",
		},
		{
			name: "the server has no engine and no SQL",
			from: []string{"internal/server/..."}, deny: append(engines(), "internal/store/..."),
			why: "handlers call the domain and hold no business rules",
		},
		{
			name: "only the store speaks SQL",
			from: []string{"..."}, except: []string{"internal/store/..."}, deny: []string{"database/sql", "database/sql/driver", "modernc.org/sqlite"}, tests: true,
			why: "there is one place for SQL",
		},
		{
			name: "the guest imports nothing of the host",
			from: []string{"internal/guest/agent/...", "internal/guest/agentproto/...", "cmd/forkd-agent/..."},
			deny: []string{"..."}, allow: []string{"internal/guest/agent/...", "internal/guest/agentproto/...", "cmd/forkd-agent/..."}, deep: true,
			why: "the agent is small, and host and guest meet in agentproto only",
		},
		{
			name: "the host's side of the agent imports the protocol only",
			from: []string{"internal/guest/agentclient/..."}, deny: []string{"..."}, allow: []string{"internal/guest/..."}, deep: true,
			why: "it is given a dial function",
		},
		{
			name: "the client is for everybody",
			from: []string{"client/...", "api/..."}, deny: []string{"internal/...", "cmd/..."}, deep: true,
			why: "other modules import it and can't import what is internal",
		},
		{
			name: "networks know no machines",
			from: []string{"internal/hostnet/...", "internal/netpolicy/...", "internal/netns/..."},
			deny: []string{"..."}, allow: []string{"internal/netpolicy", "internal/netns", "internal/vmm"}, deep: true,
			why: "the domain asks for networks; what a policy is for is decided there",
		},
		{
			name: "the domain has no networks of its own making",
			from: []string{"internal/sandbox/...", "internal/server/..."}, deny: []string{"internal/hostnet/..."}, tests: true,
			why: "they are given to it: whoever is not root has none",
		},
		{
			name: "nothing imports a command",
			from: []string{"..."}, except: []string{"cmd/..."}, deny: []string{"cmd/..."},
			why: "commands hold wiring only",
		},
		{
			name: "failpoints are a leaf",
			from: []string{"internal/failpoint"}, deny: []string{"..."}, deep: true,
			why: "any package may have a point",
		},
		{
			name: "what is shipped holds no test code",
			from: []string{"cmd/..."}, deny: []string{"testing", "internal/vmm/vmmtest/...", "test/..."}, deep: true,
			why: "vmmtest starts its own binary again, and testing adds flags",
		},
	}
}

// matches says whether a place is one of the patterns.
func matches(patterns []string, place string) bool {
	return slices.ContainsFunc(patterns, func(pattern string) bool {
		prefix, beneath := strings.CutSuffix(pattern, "...")
		return place == pattern || (beneath && strings.HasPrefix(place+"/", prefix))
	})
}

// denied lists which of the imports a rule forbids to p.
func (r rule) denied(p goPackage) []string {
	if !matches(r.from, p.path()) || matches(r.except, p.path()) {
		return nil
	}
	imports := slices.Clone(p.Imports)
	if r.deep {
		imports = append(imports, p.Deps...)
	}
	if r.tests {
		imports = append(append(imports, p.TestImports...), p.XTestImports...)
	}
	var list []string
	for _, path := range imports {
		switch {
		case path == p.ImportPath:
			continue
		case !ours(path) && (slices.Contains(r.deny, "...") || strings.HasPrefix(path, "internal/")):
			continue // all means all of ours, and the standard library has an internal/ too
		}
		if matches(r.deny, place(path)) && !matches(r.allow, place(path)) {
			list = append(list, place(path))
		}
	}
	slices.Sort(list)
	return slices.Compact(list)
}

func TestImports(t *testing.T) {
	all := packages(t)
	for _, r := range rules() {
		t.Run(r.name, func(t *testing.T) {
			for _, p := range all {
				for _, path := range r.denied(p) {
					t.Errorf("%s imports %s: %s", p.path(), path, r.why)
				}
			}
		})
	}
}
