package image

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// kernelPackage is the Debian package that depends on the newest kernel made for virtual machines.
const kernelPackage = "linux-image-cloud-amd64"

// kernel is a kernel on disk.
type kernel struct {
	path    string // bzImage
	version string
	modules string // directory with kernel/ and modules.builtin; empty: everything is built in
}

// resolveKernel returns the kernel that spec names, or Debian's, which it downloads into the cache the first time.
func (b *build) resolveKernel(ctx context.Context) (kernel, error) {
	if b.spec.Kernel != "" {
		return ownKernel(b.spec.Kernel, b.spec.Modules)
	}
	b.report(Progress{Step: "kernel", Detail: "resolving " + kernelPackage})
	pkg, err := b.debianKernel(ctx)
	if err != nil {
		return kernel{}, err
	}
	dir := filepath.Join(b.store.cacheDir, "kernels", pkg.version)
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		err = b.downloadKernel(ctx, pkg, dir)
		if err != nil {
			return kernel{}, fmt.Errorf("download kernel: %w", err)
		}
	}
	k, err := ownKernel(filepath.Join(dir, kernelFile), filepath.Join(dir, "modules"))
	if err != nil {
		return kernel{}, fmt.Errorf("cached kernel: %w: delete %s and try again", err, dir)
	}
	return k, nil
}

// debPackage is a version of a Debian package.
type debPackage struct{ name, version string }

// debianKernel asks apt which package kernelPackage stands for. On a machine that never fetched the package lists it does so.
func (b *build) debianKernel(ctx context.Context) (debPackage, error) {
	pkg, err := b.showKernel(ctx)
	if err == nil || ctx.Err() != nil {
		return pkg, err
	}
	if err := b.updateLists(ctx); err != nil {
		return debPackage{}, err
	}
	pkg, err = b.showKernel(ctx)
	if err != nil {
		return debPackage{}, fmt.Errorf("no kernel: %w: on a system without that package give --kernel and --modules", err)
	}
	return pkg, nil
}

func (b *build) showKernel(ctx context.Context) (debPackage, error) {
	out, err := b.run(ctx, command{name: "apt-cache", args: []string{"show", "--no-all-versions", kernelPackage}, timeout: time.Minute})
	if err != nil {
		return debPackage{}, err
	}
	return parseKernelPackage(out)
}

func (b *build) updateLists(ctx context.Context) error {
	b.report(Progress{Step: "kernel", Detail: "refreshing package lists (apt-get update)"})
	_, err := b.run(ctx, command{name: "apt-get", args: []string{"update", "-q", "-o", "Acquire::Retries=2"}, timeout: 5 * time.Minute})
	if err != nil {
		return fmt.Errorf("refresh package lists: %w", err)
	}
	return nil
}

// parseKernelPackage finds "linux-image-6.1.0-1-cloud-amd64 (= 6.1.2-3)" in the Depends field of a package record.
func parseKernelPackage(record []byte) (debPackage, error) {
	for line := range strings.Lines(string(record)) {
		list, ok := strings.CutPrefix(line, "Depends:")
		if !ok {
			continue
		}
		for dep := range strings.SplitSeq(list, ",") {
			name, version, ok := strings.Cut(strings.TrimSpace(dep), " (= ")
			if ok && strings.HasPrefix(name, "linux-image-") {
				return debPackage{name, strings.TrimSuffix(version, ")")}, nil
			}
		}
	}
	return debPackage{}, fmt.Errorf("package %s names no kernel", kernelPackage)
}

// downloadKernel fetches and unpacks a kernel package, without installing it, and keeps what a guest needs in dir.
func (b *build) downloadKernel(ctx context.Context, pkg debPackage, dir string) (err error) {
	st, err := newStaging(b.store.cacheDir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, st.remove()) }()

	b.report(Progress{Step: "kernel", Detail: "downloading " + pkg.name})
	if err := b.fetchPackage(ctx, pkg, st.dir); err != nil {
		return err
	}
	debs, err := filepath.Glob(st.path("*.deb"))
	if err != nil || len(debs) != 1 {
		return fmt.Errorf("apt-get download %s left %d packages, want 1", pkg.name, len(debs))
	}
	b.report(Progress{Step: "kernel", Detail: "unpacking " + pkg.name})
	tree := st.path("tree")
	if _, err := b.run(ctx, command{name: "dpkg", args: []string{"-x", debs[0], tree}, timeout: 5 * time.Minute}); err != nil {
		return err
	}
	if err := arrangeKernel(tree, st.path("kernel")); err != nil {
		return err
	}
	if err := syncTree(st.dir); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return fmt.Errorf("create kernel cache: %w", err)
	}
	if err := os.Rename(st.path("kernel"), dir); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("keep kernel in the cache: %w", err)
	}
	return syncDir(filepath.Dir(dir))
}

// fetchPackage downloads a package into dir. Lists that are too old name files that are gone: then they are refreshed once.
func (b *build) fetchPackage(ctx context.Context, pkg debPackage, dir string) error {
	get := command{name: "apt-get", dir: dir, timeout: 10 * time.Minute,
		args: []string{"download", "-q", "-o", "APT::Sandbox::User=root", "-o", "Acquire::Retries=2", pkg.name + "=" + pkg.version}}
	_, err := b.run(ctx, get)
	if err == nil || ctx.Err() != nil {
		return err
	}
	if err := b.updateLists(ctx); err != nil {
		return err
	}
	_, err = b.run(ctx, get)
	return err
}

// arrangeKernel moves a kernel and its modules from where a Debian package has them.
func arrangeKernel(tree, to string) error {
	images, err := filepath.Glob(filepath.Join(tree, "boot", "vmlinuz-*"))
	if err != nil || len(images) != 1 {
		return fmt.Errorf("kernel package has %d kernels below boot, want 1", len(images))
	}
	var dirs []string
	for _, lib := range []string{"lib", "usr/lib"} {
		found, err := filepath.Glob(filepath.Join(tree, lib, "modules", "*"))
		if err != nil {
			return fmt.Errorf("find modules: %w", err)
		}
		dirs = append(dirs, found...)
	}
	if len(dirs) != 1 {
		return fmt.Errorf("kernel package has %d directories below lib/modules, want 1", len(dirs))
	}
	if err := os.Mkdir(to, 0o755); err != nil {
		return fmt.Errorf("arrange kernel: %w", err)
	}
	if err := os.Rename(images[0], filepath.Join(to, kernelFile)); err != nil {
		return fmt.Errorf("arrange kernel: %w", err)
	}
	if err := os.Rename(dirs[0], filepath.Join(to, "modules")); err != nil {
		return fmt.Errorf("arrange kernel: %w", err)
	}
	return nil
}

// ownKernel checks a kernel and the modules that are to go with it. modules is the directory of one version, or one that holds it
// (lib/modules); empty means that the kernel has all it needs built in.
func ownKernel(path, modules string) (kernel, error) {
	version, err := kernelVersion(path)
	if err != nil {
		return kernel{}, fmt.Errorf("%w: kernel %s: %w", ErrInvalid, path, err)
	}
	k := kernel{path: path, version: version}
	if modules == "" {
		return k, nil
	}
	for _, dir := range []string{modules, filepath.Join(modules, version), filepath.Join(modules, "lib", "modules", version)} {
		if _, err := os.Stat(filepath.Join(dir, "modules.builtin")); err == nil {
			k.modules = dir
			return k, nil
		}
	}
	return kernel{}, fmt.Errorf("%w: modules %s: no modules.builtin there and no directory of modules for kernel %s", ErrInvalid, modules, version)
}

// kernelVersion reads the version from the header of a bzImage (the kernel's Documentation/arch/x86/boot.rst: kernel_version).
func kernelVersion(path string) (string, error) {
	f, err := openRegular(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	head := make([]byte, 64<<10)
	n, err := io.ReadFull(f, head)
	if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
		return "", fmt.Errorf("read header: %w", err)
	}
	head = head[:n]
	const magicAt, pointerAt, base = 0x202, 0x20e, 0x200
	if n < magicAt+0x10 || string(head[magicAt:magicAt+4]) != "HdrS" {
		return "", errors.New("not a bzImage: give the compressed kernel, vmlinuz")
	}
	at := int(binary.LittleEndian.Uint16(head[pointerAt:])) + base
	if at == base || at >= n {
		return "", errors.New("its header has no version")
	}
	text, _, _ := bytes.Cut(head[at:], []byte{0})
	version, _, _ := bytes.Cut(text, []byte{' '})
	if len(version) == 0 || len(version) > 128 {
		return "", errors.New("its header has no version")
	}
	return string(version), nil
}
