package qemu

import (
	"bytes"
	"context"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestSelfTestPassesUnderEmulation(t *testing.T) {
	if err := selfTest(t.Context(), needQEMU(t), AccelTCG, "max"); err != nil {
		t.Error(err)
	}
}

func TestSelfTestNamesWhatACPULacks(t *testing.T) {
	err := selfTest(t.Context(), needQEMU(t), AccelTCG, "max,cx16=off")
	if err == nil || !strings.Contains(err.Error(), "cmpxchg16b") {
		t.Errorf("on a CPU without cmpxchg16b: %v, want an error that names it", err)
	}
}

func TestKVMWorksAnswersInBoundedTime(t *testing.T) {
	start := time.Now()
	err := KVMWorks(context.Background(), needQEMU(t))
	if took := time.Since(start); took > selfTestLimit+5*time.Second {
		t.Errorf("took %v", took)
	}
	t.Logf("KVM on this host: %v", err)
}

func TestSelfTestCodeIsItsSource(t *testing.T) {
	for _, tool := range []string{"as", "ld", "objcopy"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("%s is not installed (binutils): the assembled code can't be compared with its source", tool)
		}
	}
	dir := t.TempDir()
	obj, elf, bin := filepath.Join(dir, "t.o"), filepath.Join(dir, "t.elf"), filepath.Join(dir, "t.bin")
	for _, args := range [][]string{
		{"as", "--64", "selftest.S", "-o", obj},
		{"ld", "-m", "elf_x86_64", "-Ttext", "0xffff0000", "-e", "0", obj, "-o", elf},
		{"objcopy", "-O", "binary", "-j", ".text", elf, bin},
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", args, err, out)
		}
	}
	if got := readFile(t, bin); !bytes.Equal(got, selfTestCode) {
		t.Errorf("selftest.bin (%d bytes) is not what selftest.S assembles to (%d bytes)", len(selfTestCode), len(got))
	}
}
