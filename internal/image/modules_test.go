package image

import (
	"bytes"
	"compress/gzip"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/zstd"
)

const vermagic = "vermagic=" + fakeVersion + " SMP"

func noXZ(string) ([]byte, error) { return nil, errors.New("no xz") }

func TestClosure(t *testing.T) {
	tests := []struct {
		name     string
		modules  map[string][]byte // below kernel/
		builtin  string
		required []string
		optional []string
		want     []string
		err      string
	}{
		{
			name: "what is needed comes first",
			modules: map[string][]byte{
				"net.ko":  fakeModule(vermagic, "depends=ring,core"),
				"ring.ko": fakeModule(vermagic, "depends=core"),
				"core.ko": fakeModule(vermagic, "depends="),
			},
			required: []string{"net"},
			want:     []string{"core", "ring", "net"},
		},
		{
			name:     "built in",
			modules:  map[string][]byte{"net.ko": fakeModule(vermagic, "depends=core")},
			builtin:  "kernel/drivers/core.ko\nkernel/fs/disk.ko\n",
			required: []string{"disk", "net"},
			want:     []string{"net"},
		},
		{
			name:     "dashes are underscores",
			modules:  map[string][]byte{"virtio-rng.ko": fakeModule(vermagic, "depends=rng-core"), "rng-core.ko": fakeModule(vermagic)},
			required: []string{"virtio_rng"},
			want:     []string{"rng_core", "virtio_rng"},
		},
		{
			name: "soft dependencies",
			modules: map[string][]byte{
				"libcrc.ko": fakeModule(vermagic, "softdep=pre: crc missing post: later"),
				"crc.ko":    fakeModule(vermagic), "later.ko": fakeModule(vermagic),
			},
			required: []string{"libcrc"},
			want:     []string{"crc", "libcrc"},
		},
		{
			name:     "optional and missing",
			modules:  map[string][]byte{"a.ko": fakeModule(vermagic), "b.ko": fakeModule(vermagic, "depends=gone")},
			required: []string{"a"},
			optional: []string{"b", "c"},
			want:     []string{"a"},
		},
		{name: "required and missing", required: []string{"a"}, err: "can't run a guest: a: neither a module nor built in"},
		{
			name:     "need that is missing",
			modules:  map[string][]byte{"a.ko": fakeModule(vermagic, "depends=b")},
			required: []string{"a"},
			err:      "a needs b",
		},
		{
			name:     "circle",
			modules:  map[string][]byte{"a.ko": fakeModule(vermagic, "depends=b"), "b.ko": fakeModule(vermagic, "depends=a")},
			required: []string{"a"},
			err:      "depends on itself",
		},
		{
			name:     "another kernel's",
			modules:  map[string][]byte{"a.ko": fakeModule("vermagic=5.10.0 SMP")},
			required: []string{"a"},
			err:      "is for kernel 5.10.0, not for " + fakeVersion,
		},
		{name: "no module at all", modules: map[string][]byte{"a.ko": []byte("text")}, required: []string{"a"}, err: "not a kernel module"},
		{name: "cut off", modules: map[string][]byte{"a.ko": fakeModule(vermagic)[:70]}, required: []string{"a"}, err: "not a kernel module"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			files := map[string][]byte{filepath.Join(dir, "modules.builtin"): []byte(tt.builtin)}
			for name, data := range tt.modules {
				files[filepath.Join(dir, "kernel", name)] = data
			}
			if err := writeFiles(files); err != nil {
				t.Fatal(err)
			}
			tree, err := openModules(dir, fakeVersion, noXZ)
			if err != nil {
				t.Fatal(err)
			}
			modules, err := tree.closure(tt.required, tt.optional)
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Errorf("closure() error = %v, want one about %q", err, tt.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, m := range modules {
				got = append(got, m.name)
			}
			if d := cmp.Diff(got, tt.want); d != "" {
				t.Errorf("closure() (-got +want):\n%s", d)
			}
		})
	}
}

func TestCompressedModules(t *testing.T) {
	ko := fakeModule(vermagic, "depends=")
	var gz bytes.Buffer
	w := gzip.NewWriter(&gz)
	if _, err := w.Write(ko); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	enc, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name string
		data []byte
		ok   bool
	}{
		{"a.ko", ko, true},
		{"a.ko.gz", gz.Bytes(), true},
		{"a.ko.zst", enc.EncodeAll(ko, nil), true},
		{"a.ko.gz", []byte("text"), false},
		{"a.ko.zst", []byte("text"), false},
		{"a.ko.xz", []byte("text"), false},
	}
	if xz, err := exec.LookPath("xz"); err == nil {
		cmd := exec.Command(xz, "-zc")
		cmd.Stdin = bytes.NewReader(ko)
		out, err := cmd.Output()
		if err != nil {
			t.Fatal(err)
		}
		tests = append(tests, struct {
			name string
			data []byte
			ok   bool
		}{"a.ko.xz", out, true})
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			err := writeFiles(map[string][]byte{filepath.Join(dir, "modules.builtin"): nil, filepath.Join(dir, "kernel", tt.name): tt.data})
			if err != nil {
				t.Fatal(err)
			}
			s, r := newStore(t)
			r.real = map[string]bool{"xz": true}
			b := &build{store: s}
			tree, err := openModules(dir, fakeVersion, b.unxz(t.Context()))
			if err != nil {
				t.Fatal(err)
			}
			m, err := tree.read("a")
			if (err == nil) != tt.ok {
				t.Fatalf("read() error = %v, want none: %v", err, tt.ok)
			}
			if tt.ok && !bytes.Equal(m.data, ko) {
				t.Errorf("read() = %d bytes, want the module's %d", len(m.data), len(ko))
			}
		})
	}
}

func TestOpenModulesWithoutList(t *testing.T) {
	if _, err := openModules(t.TempDir(), fakeVersion, noXZ); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("openModules() error = %v, want %v", err, os.ErrNotExist)
	}
}
