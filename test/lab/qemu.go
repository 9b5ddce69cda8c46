package lab

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/test/lab/guest"
)

// Bounds of the outer QEMU.
const (
	cacheMiB    = 512     // of code that it has translated
	overheadMiB = 2 << 10 // what it may need besides the guest's memory and that
)

// slowness is how many seconds pass for one of the lab's. Each tick of the lab's clock interrupts its guests, which have clocks that tick as well:
// at their true rates the ticks alone would take all the time that the lab gets on a busy host.
const slowness = 4

// enterQEMU turns this process into QEMU, in a root in memory.
// Preconditions: it is process 1 of new PID and mount namespaces and has inherited the descriptors fdQEMU and following.
func enterQEMU(cfg config) error {
	if err := privateTmpfs(cfg.Dir, "size=1g"); err != nil {
		return err
	}
	if err := unpackTar(cfg.Dir, fdQEMU); err != nil {
		return err
	}
	if err := copyFrom(filepath.Join(cfg.Dir, "vmlinuz"), fdKernel); err != nil {
		return err
	}
	if err := composeInitrd(filepath.Join(cfg.Dir, "initrd")); err != nil {
		return err
	}
	for name, minor := range map[string]uint32{"null": 3, "zero": 5, "urandom": 9} {
		dev := int(unix.Mkdev(1, minor))
		if err := unix.Mknod(filepath.Join(cfg.Dir, "dev", name), unix.S_IFCHR|0o666, dev); err != nil {
			return fmt.Errorf("device %s: %w", name, err)
		}
	}
	// The lab is what is to go when memory runs out. It may not be allowed to say so.
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("500"), 0)
	if err := unix.Chroot(cfg.Dir); err != nil {
		return fmt.Errorf("enter the root of QEMU: %w", err)
	}
	if err := unix.Chdir("/"); err != nil {
		return err
	}
	data := uint64(cfg.MemMiB+cacheMiB+overheadMiB) << 20
	for resource, limit := range map[int]uint64{unix.RLIMIT_DATA: data, unix.RLIMIT_CORE: 0} {
		if err := unix.Setrlimit(resource, &unix.Rlimit{Cur: limit, Max: limit}); err != nil {
			return fmt.Errorf("limit of QEMU: %w", err)
		}
	}
	for fd := fdRoot; fd <= max(fdPorts+cfg.Ports-1, cfg.Disk); fd++ {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFD, 0); err != nil {
			return fmt.Errorf("descriptor %d: %w", fd, err)
		}
	}
	for fd := fdQEMU; fd < fdRoot; fd++ {
		unix.CloseOnExec(fd)
	}
	// The signal for the death of the parent belongs to a thread, and it is this one that goes on as QEMU. Until then that of the first one holds.
	runtime.LockOSThread()
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
		return fmt.Errorf("end with the parent: %w", err)
	}
	args := qemuArgs(cfg)
	return fmt.Errorf("start QEMU: %w", unix.Exec(args[0], args, []string{"PATH=/usr/bin", "LANG=C", "TMPDIR=/dev"}))
}

// qemuArgs is the outer machine. One vCPU: with two some boots of nested guests hung. la57=off: with it the outer kernel crashed. Without erms and
// fsrm the kernel copies and clears memory by words: bytes are emulated one at a time, which makes 10 MB/s.
func qemuArgs(cfg config) []string {
	args := []string{"/usr/bin/qemu-system-x86_64", "-M", "microvm,acpi=on,pit=off,pic=off,rtc=on",
		"-accel", fmt.Sprintf("tcg,thread=multi,tb-size=%d", cacheMiB), "-cpu", "max,la57=off,erms=off,fsrm=off,fzrm=off,fsrs=off", "-smp", "1", "-m", fmt.Sprintf("%dM", cfg.MemMiB),
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
		"-kernel", "/vmlinuz", "-initrd", "/initrd", "-append", kernelArgs(cfg),
		"-chardev", "stdio,id=console,signal=off,mux=off", "-serial", "chardev:console",
		"-add-fd", fmt.Sprintf("fd=%d,set=1", fdRoot), "-add-fd", fmt.Sprintf("fd=%d,set=2", fdScratch), "-add-fd", fmt.Sprintf("fd=%d,set=3", fdMail),
		"-blockdev", "driver=file,node-name=root,filename=/dev/fdset/1,read-only=on,locking=off", "-device", "virtio-blk-device,drive=root",
		// What is on the scratch disk is worth nothing once the lab has ended: no write waits for the host's disk.
		"-blockdev", "driver=file,node-name=scratch,filename=/dev/fdset/2,locking=off,discard=unmap,cache.no-flush=on",
		"-device", "virtio-blk-device,drive=scratch,discard=on",
		"-blockdev", "driver=file,node-name=mail,filename=/dev/fdset/3,read-only=on,locking=off", "-device", "virtio-blk-device,drive=mail",
		"-device", fmt.Sprintf("virtio-serial-device,max_ports=%d", cfg.Ports+1),
	}
	if cfg.Disk != 0 {
		args = append(args, "-add-fd", fmt.Sprintf("fd=%d,set=4", cfg.Disk),
			"-blockdev", "driver=file,node-name=disk,filename=/dev/fdset/4,read-only=on,locking=off", "-device", "virtio-blk-device,drive=disk")
	}
	for i := range cfg.Ports {
		args = append(args, "-chardev", fmt.Sprintf("socket,id=port%d,fd=%d", i, fdPorts+i),
			"-device", fmt.Sprintf("virtserialport,nr=%d,chardev=port%d,name=%s%d", i+1, i, guest.PortPrefix, i))
	}
	return args
}

func kernelArgs(cfg config) string {
	return strings.Join([]string{"console=ttyS0", "quiet", "loglevel=4", "reboot=t", "panic=-1",
		fmt.Sprintf("tsc_early_khz=%d", slowness*cfg.TSCkHz), "tsc=reliable", "mitigations=off", "nowatchdog", "audit=0", "apparmor=0", "init_on_alloc=0",
		fmt.Sprintf("systemd.clock_usec=%d", cfg.Clock), "systemd.show_status=false", "systemd.log_target=console", "systemd.log_level=warning",
		"systemd.unified_cgroup_hierarchy=1", "kvm.halt_poll_ns=0"}, " ")
}

// composeInitrd writes the cached initramfs and, behind it, an archive with this program as /lab. The kernel unpacks one after the other.
func composeInitrd(path string) error {
	if err := copyFrom(path, fdInitrd); err != nil {
		return err
	}
	agent, err := io.ReadAll(os.NewFile(fdAgent, "agent"))
	if err != nil {
		return fmt.Errorf("read the lab's agent: %w", err)
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	var b bytes.Buffer
	cpioFile(&b, "lab", 0o100755, agent)
	cpioFile(&b, "TRAILER!!!", 0, nil)
	if _, err := f.Write(b.Bytes()); err != nil {
		return fmt.Errorf("write the initramfs: %w", err)
	}
	return f.Close()
}

// cpioFile adds a file in the format "newc" (the kernel's Documentation/driver-api/early-userspace/buffer-format.rst).
func cpioFile(b *bytes.Buffer, name string, mode int, data []byte) {
	b.WriteString("070701")
	for _, field := range []int{1, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0} {
		fmt.Fprintf(b, "%08X", field)
	}
	b.WriteString(name + "\x00")
	pad := func() { b.Write(make([]byte, -b.Len()&3)) }
	pad()
	b.Write(data)
	pad()
}

// privateTmpfs mounts a file system in memory on dir that no other mount namespace sees.
func privateTmpfs(dir, options string) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("keep mounts to ourselves: %w", err)
	}
	if err := unix.Mount("lab", dir, "tmpfs", 0, "mode=755,"+options); err != nil {
		return fmt.Errorf("mount a root in memory: %w", err)
	}
	return nil
}

func unpackTar(dir string, fd uintptr) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "tar", "-C", dir, "-xf", "-")
	cmd.Stdin = os.NewFile(fd, "archive")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("unpack QEMU: %w: %s", err, out)
	}
	return os.MkdirAll(filepath.Join(dir, "dev"), 0o755)
}

func copyFrom(path string, fd uintptr) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, os.NewFile(fd, "inherited"))
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}
