package image

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// readCPIO lists an archive as "name mode major:minor data".
func readCPIO(t *testing.T, r io.Reader) []string {
	t.Helper()
	var got []string
	for {
		head := make([]byte, 110)
		if _, err := io.ReadFull(r, head); err != nil {
			t.Fatal(err)
		}
		var f [13]int
		for i := range f {
			if _, err := fmt.Sscanf(string(head[6+8*i:14+8*i]), "%x", &f[i]); err != nil {
				t.Fatal(err)
			}
		}
		body := func(n, offset int) string {
			b := make([]byte, n+(-(n+offset)&3))
			if _, err := io.ReadFull(r, b); err != nil {
				t.Fatal(err)
			}
			return string(b[:n])
		}
		name := strings.TrimSuffix(body(f[11], 110), "\x00")
		data := body(f[6], 0)
		if string(head[:6]) != "070701" || f[5] != 0 || f[2] != 0 || f[3] != 0 {
			t.Errorf("%s: magic %s, mtime %d, owner %d:%d, want a newc archive of root's from 1970", name, head[:6], f[5], f[2], f[3])
		}
		if name == cpioTrailer {
			return got
		}
		got = append(got, fmt.Sprintf("%s %o %d:%d %s", name, f[1], f[9], f[10], data))
	}
}

func TestWriteCPIO(t *testing.T) {
	entries := []cpioEntry{
		{name: "init", mode: unix.S_IFREG | 0o755, data: []byte("agent")},
		{name: "a/b/file", mode: unix.S_IFREG | 0o644, data: []byte("1234")},
		{name: "dev/console", mode: unix.S_IFCHR | 0o600, major: 5, minor: 1},
		{name: "a", mode: unix.S_IFDIR | 0o700},
		{name: "a-b", mode: unix.S_IFREG | 0o600},
	}
	want := []string{"a 40700 0:0 ", "a-b 100600 0:0 ", "a/b 40755 0:0 ", "a/b/file 100644 0:0 1234", "dev 40755 0:0 ",
		"dev/console 20600 5:1 ", "init 100755 0:0 agent"}
	var first bytes.Buffer
	if err := writeCPIO(&first, entries); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(readCPIO(t, bytes.NewReader(first.Bytes())), want); d != "" {
		t.Errorf("archive (-got +want):\n%s", d)
	}

	entries[0], entries[4] = entries[4], entries[0]
	var second bytes.Buffer
	if err := writeCPIO(&second, entries); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(first.Bytes(), second.Bytes()) {
		t.Error("the order of the entries changes the archive")
	}
}

func TestWriteCPIORefusesNames(t *testing.T) {
	for _, name := range []string{"", "/abs", "../up", "a//b", "a/", "./a"} {
		if err := writeCPIO(io.Discard, []cpioEntry{{name: name, mode: unix.S_IFREG}}); err == nil {
			t.Errorf("writeCPIO(%q): no error", name)
		}
	}
}

func TestInitramfs(t *testing.T) {
	dir := t.TempDir()
	if err := fakeKernelTree(dir); err != nil {
		t.Fatal(err)
	}
	s, _ := newStore(t)
	b := &build{store: s, report: func(Progress) {}}
	k := kernel{version: fakeVersion, modules: dir + "/lib/modules/" + fakeVersion}
	tests := []struct {
		name   string
		kernel kernel
		fsType string
		want   []string // names
		order  string
	}{
		{"modules", k, "erofs", []string{"dev", "dev/console", "dev/null", "init", "modules", "modules/erofs.ko", "modules/libcrc32c.ko", "modules/load.order",
			"modules/overlay.ko", "modules/virtio.ko", "modules/virtio_console.ko", "modules/virtio_mmio.ko", "modules/virtio_ring.ko", "proc", "run", "sys"},
			"virtio.ko\nvirtio_ring.ko\nvirtio_mmio.ko\nvirtio_console.ko\noverlay.ko\nlibcrc32c.ko\nerofs.ko\n"},
		{"all built in", kernel{version: fakeVersion}, "erofs",
			[]string{"dev", "dev/console", "dev/null", "init", "modules", "modules/load.order", "proc", "run", "sys"}, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			raw, err := b.packInitramfs(t.Context(), tt.kernel, tt.fsType)
			if err != nil {
				t.Fatal(err)
			}
			var names []string
			order := "none"
			for _, e := range readCPIO(t, bytes.NewReader(raw)) {
				name, rest, _ := strings.Cut(e, " ")
				names = append(names, name)
				if name == moduleOrder {
					order = strings.SplitN(rest, " ", 3)[2]
				}
			}
			if d := cmp.Diff(names, tt.want); d != "" {
				t.Errorf("names (-got +want):\n%s", d)
			}
			if d := cmp.Diff(order, tt.order); d != "" {
				t.Errorf("load order (-got +want):\n%s", d)
			}
		})
	}
}
