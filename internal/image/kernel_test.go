package image

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestKernelVersion(t *testing.T) {
	tests := []struct {
		name string
		data []byte
		want string
		err  string
	}{
		{"Debian's", fakeBzImage("6.1.0-1-cloud-amd64 (debian-kernel@lists.debian.org) #1 SMP"), "6.1.0-1-cloud-amd64", ""},
		{"bare version", fakeBzImage("6.9.1"), "6.9.1", ""},
		{"no version", fakeBzImage(""), "", "no version"},
		{"cut off before the version", fakeBzImage("6.9.1")[:0x700], "", "no version"},
		{"ELF kernel", append([]byte("\x7fELF"), make([]byte, 4096)...), "", "not a bzImage"},
		{"tiny", []byte("x"), "", "not a bzImage"},
		{"empty", nil, "", "header"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "vmlinuz")
			if err := os.WriteFile(path, tt.data, 0o644); err != nil {
				t.Fatal(err)
			}
			got, err := kernelVersion(path)
			if got != tt.want {
				t.Errorf("kernelVersion() = %q, want %q", got, tt.want)
			}
			if (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) {
				t.Errorf("kernelVersion() error = %v, want one about %q", err, tt.err)
			}
		})
	}
}

func TestParseKernelPackage(t *testing.T) {
	tests := []struct {
		name   string
		record string
		want   debPackage
		ok     bool
	}{
		{"Debian's", "Package: linux-image-cloud-amd64\nSource: linux-signed\nDepends: linux-image-6.1.0-57-cloud-amd64 (= 6.1.192-3)\nSize: 1\n",
			debPackage{"linux-image-6.1.0-57-cloud-amd64", "6.1.192-3"}, true},
		{"among others", "Depends: foo (>= 1), linux-image-6.12.1+deb13-cloud-amd64 (= 6.12.1-1)\n", debPackage{"linux-image-6.12.1+deb13-cloud-amd64", "6.12.1-1"}, true},
		{"none", "Depends: foo\n", debPackage{}, false},
		{"empty", "", debPackage{}, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := parseKernelPackage([]byte(tt.record))
			if got != tt.want || (err == nil) != tt.ok {
				t.Errorf("parseKernelPackage() = %v, %v, want %v, ok %v", got, err, tt.want, tt.ok)
			}
		})
	}
}

func TestOwnKernel(t *testing.T) {
	dir := t.TempDir()
	if err := fakeKernelTree(dir); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "boot", "vmlinuz-"+fakeVersion)
	modules := filepath.Join(dir, "lib", "modules", fakeVersion)
	tests := []struct {
		name    string
		modules string
		want    string
		ok      bool
	}{
		{"everything built in", "", "", true},
		{"directory of the version", modules, modules, true},
		{"directory of versions", filepath.Dir(modules), modules, true},
		{"root of an unpacked package", dir, modules, true},
		{"elsewhere", t.TempDir(), "", false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := ownKernel(path, tt.modules)
			if tt.ok && (err != nil || got.modules != tt.want || got.version != fakeVersion) {
				t.Errorf("ownKernel() = %+v, %v, want modules %s", got, err, tt.want)
			}
			if !tt.ok && !errors.Is(err, ErrInvalid) {
				t.Errorf("ownKernel() error = %v, want %v", err, ErrInvalid)
			}
		})
	}
}
