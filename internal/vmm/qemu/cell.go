package qemu

import (
	"path/filepath"

	"github.com/forkd/forkd/internal/confine"
	"github.com/forkd/forkd/internal/vmm/probeguest"
)

// makeCell makes what monitors are confined to, and sees whether QEMU starts there. Preconditions: e.mu is held.
func (e *Engine) makeCell(binary string) error {
	if e.opt.Users == nil || e.cell != nil {
		return nil
	}
	cell, err := confine.New(confine.Spec{Binary: binary, Files: companions(binary), Devices: []string{probeguest.Device}}, e.opt.Users)
	if err != nil {
		return err
	}
	if err := cell.Try("--version"); err != nil {
		_ = cell.Close()
		return err
	}
	e.opt.Binary = binary
	e.cell = cell
	return nil
}

// companions are what a QEMU may need beside its libraries: its firmware, and the accelerators that some builds have in files of their own. Where
// they are depends on the build.
func companions(binary string) []string {
	prefix := filepath.Dir(filepath.Dir(binary))
	files := []string{"/usr/share/qemu", "/usr/share/seabios", "/usr/share/qemu-firmware", filepath.Join(prefix, "share/qemu"), filepath.Join(prefix, "share/seabios")}
	for _, dir := range []string{"/usr/lib/*/qemu", "/usr/lib/qemu", "/usr/lib64/qemu", filepath.Join(prefix, "lib/qemu"), filepath.Join(prefix, "lib/*/qemu"), filepath.Join(prefix, "lib64/qemu")} {
		modules, _ := filepath.Glob(filepath.Join(dir, "accel-*.so")) // the patterns are fine
		files = append(files, modules...)
	}
	return files
}
