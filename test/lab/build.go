package lab

import (
	"bytes"
	"context"
	"crypto/sha256"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// recipeVersion changes when the same recipe makes something else.
const recipeVersion = 1

const (
	buildLimit = 15 * time.Minute
	treeSize   = "size=4g" // of a root while it is built, in memory
)

//go:embed rootfs
var rootfs embed.FS

// recipe is how files of the cache are made from Debian's packages.
type recipe struct {
	Name     string
	Suite    string
	Packages []string
	Outputs  []string // names; each has an inherited descriptor, from 3 on
	Dir      string   // where the tree is built
}

// qemuRecipe is the outer QEMU: Debian 13's, which boots nested guests twice as fast as Debian 12's and lost none.
func qemuRecipe() recipe {
	return recipe{Name: "qemu", Suite: "trixie", Packages: []string{"qemu-system-x86"}, Outputs: []string{"qemu.tar"}}
}

// rootRecipe is what runs in the lab: Debian 12 with its stock cloud kernel.
func rootRecipe() recipe {
	return recipe{Name: "root", Suite: "bookworm", Outputs: []string{"vmlinuz", "initrd", "root.erofs"}, Packages: []string{
		"busybox-static", "ca-certificates", "cpio", "dbus", "e2fsprogs", "erofs-utils", "iproute2", "kmod", "less", "linux-image-cloud-amd64",
		"mmdebstrap", "nftables", "procps", "qemu-system-x86", "strace", "systemd", "systemd-sysv"}}
}

// artifacts are the files of the cache that a lab is made of.
type artifacts struct {
	qemu, kernel, initrd, root string
	disk                       *os.File // with the files of Options.Disk; nil: none
}

// key identifies what a recipe makes.
func (r recipe) key() string {
	all, err := json.Marshal([]any{recipeVersion, r})
	if err != nil {
		panic(err) // strings
	}
	for _, name := range []string{"init", "setup.sh"} {
		b, err := rootfs.ReadFile("rootfs/" + name)
		if err != nil {
			panic(err) // it is embedded
		}
		if r.Name == "root" {
			all = append(all, b...)
		}
	}
	return digest(string(all))
}

func digest(s string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(s)))[:16] }

// paths are where the outputs are in the cache.
func (r recipe) paths(cache string) []string {
	var paths []string
	for _, name := range r.Outputs {
		paths = append(paths, filepath.Join(cache, r.key()+"-"+name))
	}
	return paths
}

// build makes what the cache lacks.
func build(ctx context.Context, o Options) (artifacts, error) {
	if err := os.MkdirAll(o.Cache, 0o755); err != nil {
		return artifacts{}, fmt.Errorf("cache of the lab: %w", err)
	}
	var all []string
	for _, r := range []recipe{qemuRecipe(), rootRecipe()} {
		paths := r.paths(o.Cache)
		if !allThere(paths) {
			if err := make1(ctx, o, r, paths); err != nil {
				return artifacts{}, fmt.Errorf("build the lab's %s: %w", r.Name, err)
			}
		}
		all = append(all, paths...)
	}
	dropOthers(o.Cache, all)
	return artifacts{qemu: all[0], kernel: all[1], initrd: all[2], root: all[3]}, nil
}

func allThere(paths []string) bool {
	for _, path := range paths {
		if _, err := os.Stat(path); err != nil {
			return false
		}
	}
	return true
}

// keptFor is how long what no lab was made of stays in the cache.
const keptFor = 7 * 24 * time.Hour

// dropOthers removes what other recipes made, of another version of this program, and was not used for long.
func dropOthers(cache string, used []string) {
	for _, path := range used {
		_ = os.Chtimes(path, time.Now(), time.Now()) // else it is built again some day
	}
	found, _ := filepath.Glob(filepath.Join(cache, "????????????????-*"))
	for _, path := range found {
		if info, err := os.Stat(path); err == nil && time.Since(info.ModTime()) > keptFor {
			_ = os.Remove(path)
		}
	}
}

// packDisk makes a read-only disk of a directory. It has no name.
func packDisk(ctx context.Context, o Options) (*os.File, error) {
	f, err := nameless(o.Cache)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	cmd := exec.CommandContext(ctx, "mkfs.erofs", "--quiet", "/proc/self/fd/3", o.Disk)
	cmd.ExtraFiles = []*os.File{f}
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("mkfs.erofs: %w: %s", err, out)
	}
	return os.Open(fmt.Sprintf("/proc/self/fd/%d", f.Fd())) // QEMU wants a descriptor that can only be read
}

// make1 runs a recipe and publishes its outputs, which have no names before.
func make1(ctx context.Context, o Options, r recipe, paths []string) error {
	begin := time.Now()
	fmt.Fprintf(o.Log, "lab: building %s from Debian's packages (%s); this is done once\n", r.Name, r.Suite)
	ctx, cancel := context.WithTimeoutCause(ctx, buildLimit, fmt.Errorf("it took longer than %v", buildLimit))
	defer cancel()
	var outputs []*os.File
	defer func() {
		for _, f := range outputs {
			f.Close()
		}
	}()
	for range paths {
		f, err := nameless(o.Cache)
		if err != nil {
			return err
		}
		outputs = append(outputs, f)
	}
	r.Dir = o.Cache
	var said tail
	said.limit = 4 << 10
	cmd := again(ctx, roleBuild, r, outputs)
	cmd.Stdout, cmd.Stderr = &said, &said
	runtime.LockOSThread() // it is to die with us, and goes by the thread
	err := cmd.Run()
	runtime.UnlockOSThread()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err != nil {
		return fmt.Errorf("%w:\n%s", err, said.String())
	}
	for i, f := range outputs {
		err := f.Sync()
		if err == nil {
			err = unix.Linkat(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", f.Fd()), unix.AT_FDCWD, paths[i], unix.AT_SYMLINK_FOLLOW)
		}
		if err != nil && !errors.Is(err, unix.EEXIST) { // another one was faster
			return fmt.Errorf("publish %s: %w", paths[i], err)
		}
	}
	fmt.Fprintf(o.Log, "lab: built %s in %.0f s\n", r.Name, time.Since(begin).Seconds())
	return nil
}

// runRecipe makes the outputs of a recipe and writes them to the inherited descriptors.
// Preconditions: this is process 1 of new PID and mount namespaces.
func runRecipe(r recipe) error {
	if err := privateTmpfs(r.Dir, treeSize); err != nil {
		return err
	}
	if err := os.Setenv("TMPDIR", r.Dir); err != nil {
		return err
	}
	for i := range r.Outputs {
		unix.CloseOnExec(3 + i) // dash, which mmdebstrap runs, knows descriptors up to 9 only
	}
	tree := filepath.Join(r.Dir, "tree")
	if err := bootstrap(r, tree); err != nil {
		return err
	}
	if r.Name == "qemu" {
		return packQEMU(tree)
	}
	return packRoot(r.Dir, tree)
}

func bootstrap(r recipe, tree string) error {
	return command("mmdebstrap", "--mode=root", "--variant=apt", "--format=directory", "--include="+strings.Join(r.Packages, ","),
		"--dpkgopt=force-unsafe-io", "--dpkgopt=force-confold", "--dpkgopt=path-exclude=/usr/share/man/*", "--dpkgopt=path-exclude=/usr/share/doc/*",
		"--dpkgopt=path-exclude=/usr/share/locale/*", `--aptopt=Acquire::Retries "3"`, `--aptopt=Acquire::Languages "none"`,
		// The lab has an initramfs of its own.
		`--essential-hook=mkdir -p "$1/etc/initramfs-tools" && echo update_initramfs=no >"$1/etc/initramfs-tools/update-initramfs.conf"`,
		r.Suite, tree)
}

// packQEMU keeps of the tree what QEMU needs to run a microvm.
func packQEMU(tree string) error {
	out := os.NewFile(3, "output")
	args := []string{"-C", tree, "-cf", "-", "--exclude=*/gconv", "--exclude=*/perl*", "--exclude=*/sasl2", "bin", "lib", "lib64", "usr/lib64", "usr/lib/x86_64-linux-gnu",
		"usr/bin/qemu-system-x86_64", "usr/share/qemu", "usr/share/seabios", "etc/ld.so.cache", "etc/ld.so.conf", "etc/ld.so.conf.d"}
	cmd := exec.Command("tar", args...)
	cmd.Stdout = out
	return runCommand(cmd)
}

// packRoot makes the tree the lab's root and writes its kernel, initramfs and file system.
func packRoot(dir, tree string) error {
	setup := filepath.Join(tree, "setup")
	if err := os.Mkdir(setup, 0o755); err != nil {
		return err
	}
	for _, name := range []string{"init", "setup.sh"} {
		b, err := rootfs.ReadFile("rootfs/" + name)
		if err == nil {
			err = os.WriteFile(filepath.Join(setup, name), b, 0o755)
		}
		if err != nil {
			return err
		}
	}
	if err := command("chroot", tree, "/setup/setup.sh"); err != nil {
		return err
	}
	if err := os.RemoveAll(setup); err != nil {
		return err
	}
	image := filepath.Join(dir, "root.erofs")
	for i, name := range []string{"vmlinuz-lab", "initrd-lab"} {
		path := filepath.Join(tree, "boot", name)
		if err := copyTo(uintptr(3+i), path); err != nil {
			return err
		}
		if err := os.Remove(path); err != nil {
			return err
		}
	}
	if err := command("mkfs.erofs", "--quiet", image, tree); err != nil {
		return err
	}
	return copyTo(5, image)
}

func copyTo(fd uintptr, path string) error {
	in, err := os.Open(path)
	if err != nil {
		return err
	}
	defer in.Close()
	if _, err := io.Copy(os.NewFile(fd, "output"), in); err != nil {
		return fmt.Errorf("write %s: %w", filepath.Base(path), err)
	}
	return nil
}

func command(name string, args ...string) error {
	cmd := exec.Command(name, args...)
	cmd.Env = append(os.Environ(), "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8", "DEBIAN_FRONTEND=noninteractive", "HOME=/root")
	return runCommand(cmd)
}

// runCommand runs a command. Its time is bounded by that of this process, of whose PID namespace it is part.
func runCommand(cmd *exec.Cmd) error {
	var said bytes.Buffer
	cmd.Stderr = &said
	if err := cmd.Run(); err != nil {
		text := said.String()
		return fmt.Errorf("%s: %w:\n%s", cmd.Args[0], err, text[max(0, len(text)-2048):])
	}
	return nil
}
