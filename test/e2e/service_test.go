package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/forkd/forkd/client"
)

// systemdEnv names the directory with the units where a service may be installed: in the KVM lab.
const systemdEnv = "FORKD_E2E_SYSTEMD"

// Where the units have the daemon and its things.
const (
	serviceUnit = "forkd.service"
	serviceBin  = "/usr/bin/forkd"
	serviceData = "/var/lib/forkd"
	serviceSock = "/run/forkd/forkd.sock"
	unitDir     = "/etc/systemd/system"
)

// service is the daemon as systemd runs it.
type service struct {
	t    *testing.T
	pids map[string]int // of the sandboxes that are to live
}

// TestService runs the daemon by the units that are shipped. It starts when somebody connects, and sandboxes outlive it: when it is restarted,
// killed, or stopped and started, with the same machines as before, beside the service and not in it.
func TestService(t *testing.T) {
	needVM(t)
	units := os.Getenv(systemdEnv)
	if units == "" {
		t.Skipf("it installs a service: %s names the directory of the units where that is welcome, as in the lab", systemdEnv)
	}
	s := &service{t: t, pids: map[string]int{}}
	s.install(units)
	s.systemctl("start", "forkd.socket")
	if s.mainPID() != 0 {
		t.Errorf("the daemon runs before anybody has connected")
	}
	s.forkd("snapshot", "--tag", "served", "--image", bareImage, "--mem-mib", "128", "-q")
	for id := range strings.FieldsSeq(s.forkd("fork", "--tag", "served", "-n", "2", "-q")) {
		s.forkd("exec", id, "--", "sh", "-c", "echo "+id+" >/root/mine")
		s.pids[id] = s.sandbox(id).PID
		s.checkGroup(id)
	}
	for how, change := range map[string]func(){
		"restart": func() { s.systemctl("restart", serviceUnit) },
		"kill -9": func() { s.systemctl("kill", "--kill-who=main", "--signal=KILL", serviceUnit) },
		"stop": func() {
			s.systemctl("stop", serviceUnit)
			s.checkAlive()
		},
	} {
		before := s.mainPID()
		change()
		eventually(t, startLimit, func() error {
			if now := s.mainPID(); how != "stop" && (now == 0 || now == before) {
				return fmt.Errorf("%s: the daemon is process %d, and was %d", how, now, before)
			}
			return nil
		})
		for id := range s.pids {
			s.check(how, id)
		}
	}
	if got := s.forkd("fork", "--tag", "served", "-q"); got == "" {
		t.Error("no fork after all that")
	}
	s.forkd("kill", "--all")
}

// install installs the units, for the engine that is tested, and takes them away at the end.
func (s *service) install(units string) {
	t := s.t
	t.Helper()
	l := openLab(t)
	data := filepath.Join(l.data, "service")
	if err := linkTree(filepath.Join(data, "images"), os.Getenv(imagesEnv)); err != nil {
		t.Fatal(err)
	}
	unit, err := os.ReadFile(filepath.Join(units, serviceUnit))
	if err != nil {
		t.Fatal(err)
	}
	_, start, _ := strings.Cut(string(unit), "ExecStart=")
	start, _, _ = strings.Cut(start, "\n")
	dropIn := fmt.Sprintf("[Service]\nEnvironment=FORKD_FIRECRACKER=%s\nExecStart=\nExecStart=%s %s --listen=\n", os.Getenv("FORKD_FIRECRACKER"), start, strings.Join(underTest().flags(), " "))
	for _, dir := range []string{serviceData, filepath.Join(unitDir, serviceUnit+".d")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { s.remove() })
	s.run("mount", "--bind", data, serviceData)
	for dst, src := range map[string]string{serviceBin: l.bin, filepath.Join(unitDir, serviceUnit): filepath.Join(units, serviceUnit),
		filepath.Join(unitDir, "forkd.socket"): filepath.Join(units, "forkd.socket")} {
		if err := copyFile(dst, src, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(unitDir, serviceUnit+".d", "tests.conf"), []byte(dropIn), 0o644); err != nil {
		t.Fatal(err)
	}
	s.systemctl("daemon-reload")
}

// remove stops everything and takes it away.
func (s *service) remove() {
	if s.t.Failed() {
		out, _ := exec.Command("journalctl", "--no-pager", "-n", "60", "-u", serviceUnit).CombinedOutput()
		s.t.Logf("its journal:\n%s", out)
	}
	s.systemctl("stop", "forkd.socket", serviceUnit)
	s.run(serviceBin, "cleanup", "--all")
	s.run("umount", serviceData)
	for _, path := range []string{serviceBin, filepath.Join(unitDir, serviceUnit), filepath.Join(unitDir, "forkd.socket"), filepath.Join(unitDir, serviceUnit+".d")} {
		if err := os.RemoveAll(path); err != nil {
			s.t.Error(err)
		}
	}
	s.systemctl("daemon-reload")
	for id, pid := range s.pids {
		if machineOf(pid) != "" {
			s.t.Errorf("the monitor of %s is left", id)
		}
	}
}

// run runs a program that has to succeed and returns what it printed.
func (s *service) run(args ...string) string {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Env = append(os.Environ(), "FORKD_URL="+serviceSock)
	var complaint strings.Builder
	cmd.Stderr = &complaint
	out, err := cmd.Output()
	if err != nil {
		s.t.Errorf("%s: %v: %s%s", strings.Join(args, " "), err, out, complaint.String())
	}
	return strings.TrimSpace(string(out))
}

func (s *service) systemctl(args ...string) {
	s.t.Helper()
	s.run(append([]string{"systemctl"}, args...)...)
}

func (s *service) forkd(args ...string) string {
	s.t.Helper()
	return s.run(append([]string{serviceBin}, args...)...)
}

// mainPID is the daemon's process; 0 for none.
func (s *service) mainPID() (pid int) {
	s.t.Helper()
	text := s.run("systemctl", "show", "--property=MainPID", "--value", serviceUnit)
	if _, err := fmt.Sscan(text, &pid); err != nil {
		s.t.Fatalf("MainPID is %q: %v", text, err)
	}
	return pid
}

// connect returns a client of the daemon that runs or is about to.
func (s *service) connect() *client.Client {
	s.t.Helper()
	c, err := client.New(client.Config{URL: serviceSock, Token: "none"})
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(c.Close)
	return c
}

// sandbox is what the daemon knows of one.
func (s *service) sandbox(id string) client.Sandbox {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), callLimit)
	defer cancel()
	found, err := s.connect().Sandbox(ctx, id)
	if err != nil {
		s.t.Fatalf("sandbox %s: %v", id, err)
	}
	return found
}

// check holds that a sandbox is the same machine as before.
func (s *service) check(how, id string) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), callLimit)
	defer cancel()
	res, err := s.connect().Exec(ctx, id, client.ExecRequest{Args: []string{"cat", "/root/mine"}, Timeout: guestLimit})
	if got := strings.TrimSpace(string(res.Stdout)); err != nil || got != id {
		s.t.Errorf("%s: sandbox %s remembers %q, %v", how, id, got, err)
	}
	if got := s.sandbox(id); got.PID != s.pids[id] || got.State != "running" {
		s.t.Errorf("%s: sandbox %s is %s, process %d, and was %d", how, id, got.State, got.PID, s.pids[id])
	}
}

// checkAlive holds that all monitors run.
func (s *service) checkAlive() {
	s.t.Helper()
	for id, pid := range s.pids {
		if filepath.Base(machineOf(pid)) != id {
			s.t.Errorf("the monitor of %s, process %d, has ended", id, pid)
		}
	}
}

// checkGroup holds that a monitor is in the daemon's slice, and not in its service.
func (s *service) checkGroup(id string) {
	s.t.Helper()
	group, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", s.pids[id]))
	if text := string(group); err != nil || !strings.Contains(text, "/forkd.slice/") || strings.Contains(text, serviceUnit) {
		s.t.Errorf("the monitor of %s is in the group %q, %v, want one of its own in forkd.slice", id, text, err)
	}
}
