package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestStateIsTheChildsOwn writes something in every place a guest has: files of the root, of /tmp and of /dev/shm, memory of the
// interpreter, the kernel. Nobody else may ever see it.
func TestStateIsTheChildsOwn(t *testing.T) {
	d := sharedDaemon(t)
	before := manifestOf(d, pyTag)
	const n = 50
	children := d.fork(n)

	mark := func(i int) string { return fmt.Sprintf("mark-of-child-%d", i) }
	d.each(children, func(i int, g *guest) error {
		m := mark(i)
		if _, err := g.tryPy(fmt.Sprintf("inherited[%q] = numpy.full(100_000, %d); mine = %q", m, i, m)); err != nil {
			return err
		}
		_, err := g.trySh(fmt.Sprintf("echo %[1]s >/etc/mark; echo %[1]s >/tmp/%[1]s; echo %[1]s >>/dev/shm/mark; rm /etc/debian_version; echo %[1]s >/proc/sys/kernel/domainname", m))
		return err
	})
	d.each(children, func(i int, g *guest) error { return seesOnly(g, mark(i), i) })

	later := d.fork(3)
	d.each(later, func(_ int, g *guest) error { return seesNothing(g) })
	d.fillPool(pyTag, 1)
	claimed := d.fork1(fromPool)
	d.fillPool(pyTag, 0)
	if err := seesNothing(claimed); err != nil {
		t.Error(err)
	}

	if out := d.forkd("snapshot-verify", pyTag); out.code != 0 || strings.TrimSpace(out.stdout) != pyTag {
		t.Errorf("snapshot-verify: %v", out)
	}
	if after := manifestOf(d, pyTag); after != before {
		t.Errorf("the snapshot's manifest is not what it was before:\n%s\nbefore:\n%s", after, before)
	}
}

// seesOnly checks that a child has what it wrote and nothing of its siblings.
func seesOnly(g *guest, mark string, i int) error {
	var got []string
	code := `[mine, str(sorted(inherited)), str(int(inherited[mine].sum()) // 100_000), open("/etc/mark").read().strip(),
 " ".join(f for f in os.listdir("/tmp") if f.startswith("mark")), open("/dev/shm/mark").read().strip(),
 str(os.path.exists("/etc/debian_version")), open("/proc/sys/kernel/domainname").read().strip()]`
	if err := g.tryPyJSON(code, &got); err != nil {
		return err
	}
	want := []string{mark, fmt.Sprintf("['from', '%s']", mark), fmt.Sprint(i), mark, mark, mark, "False", mark}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		return fmt.Errorf("sees %q, want only what it wrote: %q", got, want)
	}
	return nil
}

// seesNothing checks that a child is as the parent was.
func seesNothing(g *guest) error {
	var got []string
	code := `[str("mine" in globals()), str(sorted(inherited)), str(os.path.exists("/etc/mark")), str([f for f in os.listdir("/tmp") if f.startswith("mark")]),
 str(os.path.exists("/dev/shm/mark")), str(os.path.exists("/etc/debian_version")), open("/proc/sys/kernel/domainname").read().strip()]`
	if err := g.tryPyJSON(code, &got); err != nil {
		return err
	}
	want := []string{"False", "['from']", "False", "[]", "False", "True", "(none)"}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		return fmt.Errorf("%v sees %q of another child, want %q", g, got, want)
	}
	return nil
}

// manifestOf is the manifest of a snapshot, with the digests that the daemon tells.
func manifestOf(d *daemon, tag string) string {
	d.t.Helper()
	ctx, cancel := d.limited()
	defer cancel()
	info, err := d.client.SnapshotInfo(ctx, tag)
	if err != nil {
		d.t.Fatal(err)
	}
	manifest, err := os.ReadFile(filepath.Join(info.Dir, "manifest.json"))
	if err != nil {
		d.t.Fatal(err)
	}
	return info.ContentHash + "\n" + string(manifest)
}
