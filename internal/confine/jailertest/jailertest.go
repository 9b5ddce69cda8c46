// Package jailertest is a fake of Firecracker's jailer, for tests where the real one is not at hand: it does what the published description of the
// jailer says it does, with the same arguments. A test's binary becomes it by calling Main under the name that Name returns; the name says how
// it fails.
package jailertest

import (
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// prefix is how the name of a fake begins.
const prefix = "fakejailer"

// Ways in which a fake fails, for Name.
const (
	Works     = ""
	Stall     = "stall"    // it never gets there
	Garbage   = "garbage"  // it writes nonsense and ends
	Refuse    = "refuse"   // it ends with a message
	Keep      = "keep"     // it leaves a descriptor open that it should close
	NoDevice  = "nodevice" // it can't make /dev/kvm
	OldBinary = "old"      // it says that it is of another version
)

// Name is the file name of a fake that says it has a version, and fails in a way.
func Name(version, fault string) string { return prefix + "_" + version + "_" + fault }

// Is says whether a program that was started by that path is to be a fake.
func Is(path string) bool { return strings.HasPrefix(filepath.Base(path), prefix+"_") }

// Main is the program. It returns the status to end with.
func Main(args []string) int {
	runtime.LockOSThread() // namespaces are a thread's
	parts := strings.SplitN(filepath.Base(args[0]), "_", 3)
	if len(args) == 2 && args[1] == "--version" {
		if parts[2] == OldBinary {
			parts[1] = "1.7.0"
		}
		fmt.Printf("Jailer v%s\n\n", parts[1])
		return 0
	}
	err := errors.New("the fake was started by a name that is none of its own")
	if len(parts) == 3 {
		err = jail(args[1:], parts[2])
	}
	fmt.Fprintln(os.Stderr, "fake jailer:", err)
	return 1
}

// flags are the jailer's arguments.
type flags struct {
	id, program, base string
	uid, gid          int
	rest              []string
}

func parse(args []string) (f flags, err error) {
	numbers := map[string]*int{"--uid": &f.uid, "--gid": &f.gid}
	texts := map[string]*string{"--id": &f.id, "--exec-file": &f.program, "--chroot-base-dir": &f.base}
	seen := map[string]bool{}
	for len(args) > 0 && args[0] != "--" {
		if len(args) < 2 {
			return f, fmt.Errorf("%s has no value", args[0])
		}
		switch name, value := args[0], args[1]; {
		case seen[name]:
			return f, fmt.Errorf("%s is given twice", name)
		case texts[name] != nil:
			*texts[name] = value
		case numbers[name] != nil:
			if *numbers[name], err = strconv.Atoi(value); err != nil {
				return f, err
			}
		default:
			return f, fmt.Errorf("%s is not known", name)
		}
		seen[args[0]] = true
		args = args[2:]
	}
	for _, need := range []string{"--id", "--exec-file", "--uid", "--gid"} {
		if !seen[need] {
			return f, fmt.Errorf("%s is required", need)
		}
	}
	if len(args) > 0 {
		f.rest = args[1:]
	}
	if !strings.Contains(filepath.Base(f.program), "firecracker") { // before 1.16
		return f, fmt.Errorf("%s has no firecracker in its name", f.program)
	}
	return f, nil
}

// jail does what the jailer does, and becomes the program. It returns only with an error.
func jail(args []string, fault string) error {
	if fault != Keep {
		if err := unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
			return err
		}
	} else if _, err := unix.Open("/", unix.O_PATH, 0); err != nil {
		return err
	}
	f, err := parse(args)
	if err != nil {
		return err
	}
	root := filepath.Join(f.base, filepath.Base(f.program), f.id, "root")
	if err := os.MkdirAll(root, 0o755); err != nil {
		return err
	}
	if err := copyProgram(f, root); err != nil {
		return err
	}
	if err := enter(root); err != nil {
		return err
	}
	if err := furnish(f, fault); err != nil {
		return err
	}
	switch fault {
	case Stall:
		time.Sleep(time.Hour)
	case Garbage:
		_, err := os.Stderr.WriteString("\x00\x01 garbage \xff\n")
		return err
	case Refuse:
		return errors.New("ordered to refuse")
	}
	for _, set := range []func() error{func() error { return unix.Setgroups(nil) }, func() error { return unix.Setresgid(f.gid, f.gid, f.gid) },
		func() error { return unix.Setresuid(f.uid, f.uid, f.uid) }} {
		if err := set(); err != nil {
			return err
		}
	}
	name := "/" + filepath.Base(f.program)
	return unix.Exec(name, append([]string{name, "--id", f.id, "--start-time-us", "1", "--start-time-cpu-us", "1", "--parent-cpu-time-us", "1"}, f.rest...), nil)
}

func copyProgram(f flags, root string) error {
	from, err := os.Open(f.program)
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := os.OpenFile(filepath.Join(root, filepath.Base(f.program)), os.O_WRONLY|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(to, from)
	return errors.Join(err, to.Chown(f.uid, f.gid), to.Close())
}

// enter makes root the root.
func enter(root string) error {
	const old = "old_root"
	for _, do := range []func() error{
		func() error { return unix.Unshare(unix.CLONE_NEWNS) },
		func() error { return unix.Mount("", "/", "", unix.MS_SLAVE|unix.MS_REC, "") },
		func() error { return unix.Mount(root, root, "", unix.MS_BIND|unix.MS_REC, "") },
		func() error { return unix.Chdir(root) },
		func() error { return unix.Mkdir(old, 0o600) },
		func() error { return unix.PivotRoot(".", old) },
		func() error { return unix.Chdir("/") },
		func() error { return unix.Unmount(old, unix.MNT_DETACH) },
		func() error { return unix.Rmdir(old) },
	} {
		if err := do(); err != nil {
			return fmt.Errorf("enter %s: %w", root, err)
		}
	}
	return nil
}

// furnish makes the directories and devices of a jail.
func furnish(f flags, fault string) error {
	for _, dir := range []string{"/", "/dev", "/dev/net", "/run"} {
		if err := errors.Join(os.MkdirAll(dir, 0o700), os.Chmod(dir, 0o700), os.Chown(dir, f.uid, f.gid)); err != nil {
			return err
		}
	}
	if fault == NoDevice {
		return errors.New("failed to create /dev/kvm via mknod inside the jail: operation not permitted")
	}
	for path, device := range map[string][2]uint32{"/dev/kvm": {10, 232}, "/dev/net/tun": {10, 200}, "/dev/urandom": {1, 9}} {
		err := unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(device[0], device[1])))
		if err := errors.Join(err, os.Chown(path, f.uid, f.gid)); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	pid, err := os.OpenFile("/"+filepath.Base(f.program)+".pid", os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	_, err = fmt.Fprint(pid, os.Getpid())
	return errors.Join(err, pid.Close())
}
