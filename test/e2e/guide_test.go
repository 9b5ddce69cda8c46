package e2e

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/forkd/forkd/docs/guide"
)

// TestFirecrackerGuide does what "Firecracker on your own KVM host" says, line by line, from a clean root, as somebody does who reads it. There is no
// internet in the lab: what is downloaded and built with it (Firecracker, forkd, an image) is there already.
func TestFirecrackerGuide(t *testing.T) {
	needVM(t)
	units, binary := os.Getenv(systemdEnv), os.Getenv("FORKD_FIRECRACKER")
	if units == "" || binary == "" {
		t.Skipf("it installs forkd on this host: %s names the directory of the units where that is welcome, as in the lab, and FORKD_FIRECRACKER a Firecracker", systemdEnv)
	}
	for _, path := range []string{serviceBin, serviceData, filepath.Join(unitDir, serviceUnit), "/usr/bin/firecracker"} {
		if _, err := os.Stat(path); err == nil {
			t.Fatalf("this root is not clean: it has %s", path)
		}
		t.Cleanup(func() { _ = os.RemoveAll(path) })
	}
	source := t.TempDir()
	for to, from := range map[string]string{"firecracker": binary, "bin/forkd": os.Getenv("FORKD_BIN"), "packaging/systemd/forkd.service": filepath.Join(units, serviceUnit)} {
		to = filepath.Join(source, to)
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := copyFile(to, from, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	// The root of the lab is small.
	data := filepath.Join(openLab(t).data, "guide")
	if err := errors.Join(linkTree(filepath.Join(data, "images"), os.Getenv(imagesEnv)), os.MkdirAll(serviceData, 0o755)); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("mount", "--bind", data, serviceData).CombinedOutput(); err != nil {
		t.Fatalf("mount %s: %v: %s", data, err, out)
	}
	t.Cleanup(func() {
		_ = exec.Command("systemctl", "stop", serviceUnit).Run()
		if out, err := exec.Command("umount", serviceData).CombinedOutput(); err != nil {
			t.Errorf("umount %s: %v: %s", serviceData, err, out)
		}
	})
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
	if strings.Contains(out, "a live capture is not possible") {
		t.Error("the guide's branch was not live: does the unit give the daemon a seccomp filter?")
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
