package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/forkd/forkd/docs/guide"
	"github.com/forkd/forkd/internal/vmm/firecracker"
	"github.com/forkd/forkd/packaging/systemd"
)

// guideEnv allows TestFirecrackerGuide, which installs forkd on this very host: in the lab nobody minds.
const guideEnv = "FORKD_GUIDE"

// TestFirecrackerGuide does what "Firecracker on your own KVM host" says, line by line, from a clean root, as somebody does who reads it. There is no
// internet in the lab: what is downloaded and built with it (Firecracker, forkd, an image) is there already.
func TestFirecrackerGuide(t *testing.T) {
	needVM(t)
	if os.Getenv(guideEnv) == "" {
		t.Skipf("it installs forkd on this host: `make lab-guide` runs it in the lab, %s=1 here", guideEnv)
	}
	for _, path := range []string{"/usr/bin/forkd", "/usr/bin/firecracker", "/var/lib/forkd", "/etc/systemd/system/forkd.service"} {
		if _, err := os.Stat(path); err == nil {
			t.Fatalf("this root is not clean: it has %s", path)
		}
	}
	source := t.TempDir()
	binary, err := exec.LookPath(firecracker.DefaultBinary)
	if err != nil {
		t.Fatal(err)
	}
	copies := map[string]string{"firecracker": binary, "bin/forkd": os.Getenv("FORKD_BIN")}
	for to, from := range copies {
		to = filepath.Join(source, to)
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := copyFile(to, from, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	unit := filepath.Join(source, "packaging/systemd/forkd.service")
	if err := os.MkdirAll(filepath.Dir(unit), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(unit, []byte(systemd.Service), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := linkTree("/var/lib/forkd/images", os.Getenv(imagesEnv)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = exec.Command("systemctl", "stop", "forkd").Run() })
	out := follow(t, source, guideScript(t))
	for _, want := range []string{"\nactive\n", "\nLinux ", "\n3\n", "\nkept\n"} {
		if !strings.Contains(out, want) {
			t.Errorf("the guide's commands did not print %q", want)
		}
	}
	journal, _ := exec.Command("journalctl", "-u", "forkd", "--no-pager").CombinedOutput()
	if !strings.Contains(string(journal), "msg=engine name=firecracker") {
		t.Errorf("the service does not say that Firecracker runs its machines:\n%s", journal)
	}
	if !regexp.MustCompile(`(?m)^confinement +full$`).MatchString(out) {
		t.Error("the guide's sandbox was not confined")
	}
	if left, err := exec.Command("pgrep", "-x", "firecracker").Output(); err == nil {
		t.Errorf("processes that are left: %s", left)
	}
}

// guideScript is all that the guide has its reader type, but for what needs the internet.
func guideScript(t *testing.T) string {
	t.Helper()
	var script strings.Builder
	blocks := strings.Split(guide.Firecracker, "```")
	for i := 1; i < len(blocks); i += 2 {
		kind, text, _ := strings.Cut(blocks[i], "\n")
		if kind == "sh" {
			script.WriteString(text)
		}
	}
	if script.Len() == 0 {
		t.Fatal("the guide has no commands")
	}
	return script.String()
}

// follow runs a script in a shell, which ends at the first command that fails.
func follow(t *testing.T, dir, script string) string {
	t.Helper()
	cmd := exec.Command("sh", "-eux", "-c", script)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "FORKD_URL=", "FORKD_CACHE=", "FORKD_FIRECRACKER=", "PATH=/usr/sbin:/usr/bin:/sbin:/bin")
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		journal, _ := exec.Command("journalctl", "-u", "forkd", "--no-pager", "-n", "60").CombinedOutput()
		t.Fatalf("the guide's commands: %v\n%s", err, journal)
	}
	return string(out)
}
