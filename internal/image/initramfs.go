package image

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Modules that go into an initramfs, in the order in which a guest wants them: its disk and its agent's channel come first. The root
// file system's follows the required ones.
var (
	requiredModules = []string{"virtio_mmio", "virtio_blk", "virtio_console", "overlay"}
	optionalModules = []string{"virtio_rng", "virtio_net", "vmw_vsock_virtio_transport"}
)

// moduleOrder lists the modules to load, one path below /modules a line; the agent reads it.
const moduleOrder = "modules/load.order"

// packInitramfs makes the initramfs for a kernel: the agent as /init, the modules it has to load, and what it needs before it has
// mounted anything. Nothing is compressed: unpacking would run emulated and cost more than reading.
func (b *build) packInitramfs(ctx context.Context, k kernel, rootfsType string) ([]byte, error) {
	modules, err := b.selectModules(ctx, k, rootfsType)
	if err != nil {
		return nil, err
	}
	entries := []cpioEntry{
		{name: "init", mode: unix.S_IFREG | 0o755, data: b.store.agent},
		{name: "dev/console", mode: unix.S_IFCHR | 0o600, major: 5, minor: 1},
		{name: "dev/null", mode: unix.S_IFCHR | 0o666, major: 1, minor: 3},
	}
	for _, dir := range []string{"dev", "modules", "proc", "run", "sys"} {
		entries = append(entries, cpioEntry{name: dir, mode: unix.S_IFDIR | 0o755})
	}
	var order strings.Builder
	for _, m := range modules {
		file := m.name + ".ko"
		fmt.Fprintln(&order, file)
		entries = append(entries, cpioEntry{name: "modules/" + file, mode: unix.S_IFREG | 0o644, data: m.data})
	}
	entries = append(entries, cpioEntry{name: moduleOrder, mode: unix.S_IFREG | 0o644, data: []byte(order.String())})

	var out bytes.Buffer
	if err := writeCPIO(&out, entries); err != nil {
		return nil, fmt.Errorf("pack initramfs: %w", err)
	}
	return out.Bytes(), nil
}

func (b *build) selectModules(ctx context.Context, k kernel, rootfsType string) ([]module, error) {
	if k.modules == "" {
		return nil, nil
	}
	tree, err := openModules(k.modules, k.version, b.unxz(ctx))
	if err != nil {
		return nil, err
	}
	modules, err := tree.closure(append(slices.Clone(requiredModules), rootfsType), optionalModules)
	if errors.Is(err, errNoModule) {
		return nil, fmt.Errorf("%w: %w: give modules that match the kernel (looked in %s)", ErrInvalid, err, filepath.Clean(k.modules))
	}
	return modules, err
}

// unxz returns a function that unpacks a file with xz: there is no decoder for that in the standard library.
func (b *build) unxz(ctx context.Context) func(path string) ([]byte, error) {
	return func(path string) ([]byte, error) {
		return b.run(ctx, command{name: "xz", args: []string{"-dc", "--memlimit-decompress=256MiB", path}, timeout: time.Minute})
	}
}
