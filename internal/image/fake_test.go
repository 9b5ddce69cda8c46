package image

import (
	"context"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

const fakeVersion = "6.1.0-1-cloud-amd64"

// fakeRunner stands for Debian's tools: it makes what they would, in small.
type fakeRunner struct {
	mu     sync.Mutex
	ran    []string                     // the commands so far
	before func(n int, c command) error // called before the n-th command (from 1)
	real   map[string]bool              // commands that are not faked
}

func (r *fakeRunner) run(ctx context.Context, c command) ([]byte, error) {
	r.mu.Lock()
	r.ran = append(r.ran, strings.Join(append([]string{c.name}, c.args...), " "))
	n := len(r.ran)
	r.mu.Unlock()
	if r.before != nil {
		if err := r.before(n, c); err != nil {
			return nil, err
		}
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if r.real[c.name] {
		return osRunner{}.run(ctx, c)
	}
	last := c.args[len(c.args)-1]
	switch {
	case c.name == "apt-cache":
		return []byte("Package: linux-image-cloud-amd64\nDepends: linux-image-" + fakeVersion + " (= 6.1.2-3)\n"), nil
	case c.name == "apt-get" && c.args[0] == "download":
		return nil, os.WriteFile(filepath.Join(c.dir, "kernel.deb"), nil, 0o644)
	case c.name == "apt-get" && c.args[0] == "update":
		return nil, nil
	case c.name == "dpkg":
		return nil, fakeKernelTree(last)
	case c.name == "mmdebstrap":
		c.line("I: downloading packages with apt...")
		return nil, fakeRoot(last)
	case c.name == "mkfs.erofs":
		return nil, fakeErofs(c.args[len(c.args)-2], last)
	}
	return nil, fmt.Errorf("no fake for %s", c.name)
}

func fakeKernelTree(dir string) error {
	modules := filepath.Join(dir, "lib/modules", fakeVersion)
	files := map[string][]byte{
		filepath.Join(dir, "boot/vmlinuz-"+fakeVersion): fakeBzImage(fakeVersion + " (builder) #1"),
		filepath.Join(modules, "modules.builtin"):       []byte("kernel/drivers/virtio/virtio_blk.ko\n"),
	}
	for name, depends := range map[string]string{"virtio": "", "virtio_ring": "virtio", "virtio_mmio": "virtio,virtio_ring",
		"virtio_console": "virtio", "overlay": "", "erofs": "libcrc32c", "libcrc32c": "", "squashfs": "", "ext4": ""} {
		files[filepath.Join(modules, "kernel", name+".ko")] = fakeModule("depends="+depends, "vermagic="+fakeVersion+" SMP")
	}
	return writeFiles(files)
}

func fakeRoot(dir string) error {
	return writeFiles(map[string][]byte{
		filepath.Join(dir, "etc/passwd"):                      []byte("root:x:0:0:root:/root:/bin/bash\n"),
		filepath.Join(dir, "etc/group"):                       []byte("root:x:0:\n"),
		filepath.Join(dir, "etc/shadow"):                      []byte("root:*:19000:0:99999:7:::\n"),
		filepath.Join(dir, "etc/gshadow"):                     []byte("root:*::\n"),
		filepath.Join(dir, "etc/skel/.profile"):               []byte("# profile\n"),
		filepath.Join(dir, "etc/hostname"):                    []byte("the-host\n"),
		filepath.Join(dir, "usr/bin/python3"):                 []byte("ELF"),
		filepath.Join(dir, "var/lib/apt/lists/some_list"):     []byte("list"),
		filepath.Join(dir, "var/cache/apt/pkgcache.bin"):      []byte("cache"),
		filepath.Join(dir, "etc/apt/apt.conf.d/99mmdebstrap"): []byte("conf"),
	})
}

// fakeErofs writes a superblock and something that depends on the tree.
func fakeErofs(file, tree string) error {
	names, err := filepath.Glob(filepath.Join(tree, "*"))
	if err != nil {
		return err
	}
	block := make([]byte, 8192)
	binary.LittleEndian.PutUint32(block[1024:], erofsMagic)
	copy(block[4096:], fmt.Sprint(len(names)))
	return os.WriteFile(file, block, 0o644)
}

func writeFiles(files map[string][]byte) error {
	for name, data := range files {
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(name, data, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// fakeBzImage is the header of one, as far as the version needs it.
func fakeBzImage(version string) []byte {
	b := make([]byte, 0x1000)
	copy(b[0x202:], "HdrS")
	binary.LittleEndian.PutUint16(b[0x20e:], 0x600)
	copy(b[0x800:], version+"\x00")
	return b
}

// fakeModule is an ELF file with nothing but a .modinfo section.
func fakeModule(entries ...string) []byte {
	info := []byte(strings.Join(entries, "\x00") + "\x00")
	names := []byte("\x00.modinfo\x00.shstrtab\x00")
	const ehsize, shsize = 64, 64
	infoAt, namesAt := ehsize, ehsize+len(info)
	sectionsAt := (namesAt + len(names) + 7) &^ 7
	b := make([]byte, sectionsAt+3*shsize)
	copy(b, "\x7fELF\x02\x01\x01")
	le := binary.LittleEndian
	le.PutUint16(b[16:], uint16(elf.ET_REL))
	le.PutUint16(b[18:], uint16(elf.EM_X86_64))
	le.PutUint32(b[20:], 1)
	le.PutUint64(b[40:], uint64(sectionsAt))
	le.PutUint16(b[52:], ehsize)
	le.PutUint16(b[58:], shsize)
	le.PutUint16(b[60:], 3)
	le.PutUint16(b[62:], 2)
	copy(b[infoAt:], info)
	copy(b[namesAt:], names)
	section := func(i int, name, kind uint32, at, size int) {
		s := b[sectionsAt+i*shsize:]
		le.PutUint32(s, name)
		le.PutUint32(s[4:], kind)
		le.PutUint64(s[24:], uint64(at))
		le.PutUint64(s[32:], uint64(size))
	}
	section(1, 1, uint32(elf.SHT_PROGBITS), infoAt, len(info))
	section(2, 10, uint32(elf.SHT_STRTAB), namesAt, len(names))
	return b
}

var errInjected = errors.New("injected")

// newStore returns a store in a temporary directory whose tools are faked.
func newStore(t *testing.T) (*Store, *fakeRunner) {
	t.Helper()
	s, err := Open(filepath.Join(t.TempDir(), "images"), filepath.Join(t.TempDir(), "cache"), []byte("agent"))
	if err != nil {
		t.Fatal(err)
	}
	r := &fakeRunner{}
	s.run = r
	return s, r
}

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: it makes files of other users")
	}
}

// tree lists what is below dir, two levels deep.
func tree(t *testing.T, dir string) []string {
	t.Helper()
	var names []string
	for _, pattern := range []string{"*", "*/*"} {
		found, err := filepath.Glob(filepath.Join(dir, pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range found {
			rel, err := filepath.Rel(dir, f)
			if err != nil {
				t.Fatal(err)
			}
			names = append(names, rel)
		}
	}
	return names
}
