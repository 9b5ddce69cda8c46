package probeguest

import (
	"bytes"
	"debug/elf"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestCodeIsItsSource(t *testing.T) {
	for _, tool := range []string{"as", "ld", "objcopy"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("%s is not installed (binutils): the assembled code can't be compared with its source", tool)
		}
	}
	for _, tt := range []struct {
		source, address string
		code            []byte
	}{{"guest.S", "0x100000", guestCode}, {"selftest.S", "0xffff0000", selfTestCode}} {
		t.Run(tt.source, func(t *testing.T) {
			dir := t.TempDir()
			obj, elf, bin := filepath.Join(dir, "t.o"), filepath.Join(dir, "t.elf"), filepath.Join(dir, "t.bin")
			for _, args := range [][]string{
				{"as", "--64", tt.source, "-o", obj},
				{"ld", "-m", "elf_x86_64", "-Ttext", tt.address, "-e", "0", obj, "-o", elf},
				{"objcopy", "-O", "binary", "-j", ".text", elf, bin},
			} {
				if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
					t.Fatalf("%v: %v: %s", args, err, out)
				}
			}
			got, err := os.ReadFile(bin)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, tt.code) {
				t.Errorf("%s assembles to %d bytes that are not the %d that are embedded: run go generate", tt.source, len(got), len(tt.code))
			}
		})
	}
}

func TestKernelIsAnELFFile(t *testing.T) {
	f, err := elf.NewFile(bytes.NewReader(Kernel()))
	if err != nil {
		t.Fatal(err)
	}
	if f.Entry != guestBase || len(f.Progs) != 1 || f.Progs[0].Paddr != guestBase {
		t.Errorf("entry %#x, segments %v", f.Entry, f.Progs)
	}
	code := make([]byte, len(guestCode))
	if _, err := f.Progs[0].ReadAt(code, 0); err != nil || !bytes.Equal(code, guestCode) {
		t.Errorf("the segment is not the code (%v)", err)
	}
}

func TestCheckAnswersInTwoSeconds(t *testing.T) {
	begin := time.Now()
	err := Check()
	took := time.Since(begin)
	t.Logf("KVM on this host, after %v: %v", took, err)
	if took > 3*time.Second {
		t.Errorf("took %v, want about 2 s at most", took)
	}
	if err != nil && !errors.Is(err, ErrNoKVM) && !errors.Is(err, ErrNoStockKernel) {
		t.Errorf("%v wraps no error of this package", err)
	}
}

func TestCheckNamesTheCause(t *testing.T) {
	text := filepath.Join(t.TempDir(), "kvm")
	if err := os.WriteFile(text, []byte("no KVM"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ name, path, want string }{
		{"missing", filepath.Join(t.TempDir(), "none"), "no such file"},
		{"not KVM", text, "ask for KVM's version"},
		{"another device", "/dev/null", "ask for KVM's version"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if err := checkDevice(tt.path); !errors.Is(err, ErrNoKVM) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want ErrNoKVM about %q", err, tt.want)
			}
		})
	}
}

func TestFailedAt(t *testing.T) {
	for said, want := range map[string]string{"": "run any instruction", "RPLS": "run cmpxchg16b", SelfTestDone: "run a short loop"} {
		if got := FailedAt(said); got != want {
			t.Errorf("FailedAt(%q) = %q, want %q", said, got, want)
		}
	}
}
