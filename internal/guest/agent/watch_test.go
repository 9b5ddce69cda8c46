package agent

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/guest/agentclient"
	"github.com/forkd/forkd/internal/guest/agentproto"
)

func TestKilledForMemory(t *testing.T) {
	const rest = " total-vm:9kB, anon-rss:8kB, file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:5kB oom_score_adj:0\n SUBSYSTEM=x\n"
	for _, tc := range []struct {
		name, record string
		pid          int
		victim       string
		ok           bool
	}{
		{"a kill", "3,410,99,-;Out of memory: Killed process 123 (python3)" + rest, 123, "python3", true},
		{"of a group", "3,410,99,-;Memory cgroup out of memory: Killed process 7 (sh)" + rest, 7, "sh", true},
		{"a name that looks like the end", "3,410,99,-;Out of memory: Killed process 7 (a) total-vm:1kB)" + rest, 7, "a", true},
		{"a program's own words", "12,410,99,-;Out of memory: Killed process 123 (python3)" + rest, 0, "", false},
		{"something else", "6,410,99,-;oom_reaper: reaped process 123 (python3), now anon-rss:0kB", 0, "", false},
		{"no number", "3,1,1,-;Out of memory: Killed process x (y)", 0, "", false},
		{"nothing", "", 0, "", false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			pid, victim, ok := killedForMemory(tc.record)
			if ok != tc.ok || ok && (pid != tc.pid || victim != tc.victim) {
				t.Errorf("got %d, %q, %v, want %d, %q, %v", pid, victim, ok, tc.pid, tc.victim, tc.ok)
			}
		})
	}
}

// shortRig is an agent with a log of a kernel, which the test writes, and a file system of the test's own where it may make one.
func shortRig(t *testing.T, disk string) (r *rig, say func(string), notices <-chan agentproto.Notice) {
	t.Helper()
	log, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	r = newRig(t, Options{}, func(a *Agent) {
		if err := a.short.start(log[0], disk); err != nil {
			t.Fatal(err)
		}
	})
	t.Cleanup(func() { closeAll([]uintptr{uintptr(log[1])}) })
	heard := make(chan agentproto.Notice, 16)
	r.Client = agentclient.New(r.dial, agentclient.Options{Notice: func(n agentproto.Notice) { heard <- n }})
	return r, func(record string) {
		if _, err := unix.Write(log[1], []byte(record)); err != nil {
			t.Error(err)
		}
	}, heard
}

func killOf(pid int) string {
	return fmt.Sprintf("3,410,99,-;Out of memory: Killed process %d (eater) total-vm:9kB", pid)
}

func TestOutOfMemoryIsNoticed(t *testing.T) {
	r, say, notices := shortRig(t, "")
	if _, err := r.Ping(testContext(t)); err != nil {
		t.Fatal(err)
	}
	say("6,1,1,-;something happens all the time")
	say(killOf(99999999))
	if n := <-notices; n.OOMKills != 1 || n.Victim != "eater" || n.DiskFull {
		t.Errorf("got %+v, want one killed", n)
	}
	say(killOf(99999998))
	if n := <-notices; n.OOMKills != 2 {
		t.Errorf("got %+v, want two killed", n)
	}
	// Who connects later is told, too; who becomes another one has nothing to do with it.
	later := make(chan agentproto.Notice, 16)
	r.Client.Close()
	r.Client = agentclient.New(r.dial, agentclient.Options{Notice: func(n agentproto.Notice) { later <- n }})
	if _, err := r.Identify(testContext(t), sampleIdentity()); err != nil {
		t.Fatal(err)
	}
	if n := <-later; n.OOMKills != 2 {
		t.Errorf("at the beginning of a session: got %+v, want two killed", n)
	}
	if n := <-later; n.OOMKills != 0 || n.Victim != "" {
		t.Errorf("with a new identity: got %+v, want none killed", n)
	}
	if _, err := r.Identify(testContext(t), sampleIdentity()); err != nil {
		t.Fatal(err)
	}
}

func readNumber(t *testing.T, fifo string) int {
	t.Helper()
	b, err := os.ReadFile(fifo)
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestCommandKilledForMemory(t *testing.T) {
	r, say, _ := shortRig(t, "")
	said := filepath.Join(r.root, "said")
	if err := unix.Mkfifo(said, 0o600); err != nil {
		t.Fatal(err)
	}
	result := make(chan agentproto.ExecResult)
	go func() { result <- r.sh("sleep 1000 & echo $! >" + said + "; wait $!") }()
	child := readNumber(t, said)
	say(killOf(child))
	if err := unix.Kill(child, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if res := <-result; !res.OOMKilled || res.ExitCode != 128+9 {
		t.Errorf("a command whose child was killed for want of memory: got %+v", res)
	}
	if res := r.sh("exit 3"); res.OOMKilled {
		t.Errorf("the next command: got %+v", res)
	}
	go func() { result <- r.sh("echo $$ >" + said + "; sleep 1000") }()
	child = readNumber(t, said)
	say(killOf(os.Getpid())) // of another session
	if err := unix.Kill(-child, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if res := <-result; res.OOMKilled || res.ExitCode != 128+9 {
		t.Errorf("a command that was killed while another ran out of memory: got %+v", res)
	}
}

func TestFullDiskIsNoticed(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounting a small file system needs root")
	}
	disk := t.TempDir()
	if err := unix.Mount("tmpfs", disk, "tmpfs", 0, "size=8m"); err != nil {
		t.Skipf("mount: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(disk, unix.MNT_DETACH) })
	r, _, notices := shortRig(t, disk)
	if res := r.sh("exit 1"); res.DiskFull {
		t.Errorf("a command that failed with an empty disk: got %+v", res)
	}
	if res := r.sh("dd if=/dev/zero of=" + disk + "/big bs=1M"); !res.DiskFull || res.ExitCode == 0 {
		t.Errorf("a command that filled the disk: got %+v", res)
	}
	if n := <-notices; !n.DiskFull || n.DiskFree > 1<<20 || n.DiskSize != 8<<20 {
		t.Errorf("got %+v, want the disk full", n)
	}
	// Nothing fails here: it is looked at a while after.
	if res := r.sh("rm " + disk + "/big"); res.DiskFull {
		t.Errorf("a command that made room: got %+v", res)
	}
	if n := <-notices; n.DiskFull || n.DiskFree != 8<<20 {
		t.Errorf("got %+v, want room", n)
	}
}
