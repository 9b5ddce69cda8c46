package confine

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// loaderLimit is how long the loader may take to say what a program needs.
const loaderLimit = 20 * time.Second

// defaultLoader is asked about libraries, which don't name one.
const defaultLoader = "/lib64/ld-linux-x86-64.so.2"

// librariesOf returns the libraries that a program or a library needs, the loader with them. The loader itself is asked: nothing else knows
// all of its rules. A program without one, or a file that is none, needs nothing.
func librariesOf(path string) ([]string, error) {
	loader, dynamic, err := loaderOf(path)
	if err != nil || !dynamic {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), loaderLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, loader, "--list", path)
	cmd.Env = []string{"LANG=C"}
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("libraries of %s: %s --list: %w", path, loader, err)
	}
	libs := []string{loader}
	for line := range strings.Lines(string(out)) {
		// "\tlibz.so.1 => /lib/libz.so.1 (0x…)", "\t/lib64/ld-linux-x86-64.so.2 (0x…)", "\tlinux-vdso.so.1 (0x…)", "\tlibx.so => not found"
		name, target, found := strings.Cut(strings.TrimSpace(line), " => ")
		if !found {
			target = name
		}
		target, _, _ = strings.Cut(target, " (")
		switch {
		case target == "not found":
			return nil, fmt.Errorf("libraries of %s: %s is not found", path, name)
		case filepath.IsAbs(target):
			libs = append(libs, filepath.Clean(target))
		}
	}
	return libs, nil
}

// loaderOf returns the loader that a program names, and whether it needs one at all.
func loaderOf(path string) (loader string, dynamic bool, err error) {
	f, err := elf.Open(path)
	var format *elf.FormatError
	if errors.As(err, &format) {
		return "", false, nil
	}
	if err != nil {
		return "", false, fmt.Errorf("libraries of %s: %w", path, err)
	}
	defer f.Close()
	for _, p := range f.Progs {
		switch p.Type {
		case elf.PT_DYNAMIC:
			dynamic = true
		case elf.PT_INTERP:
			b := make([]byte, p.Filesz)
			if _, err := p.ReadAt(b, 0); err != nil {
				return "", false, fmt.Errorf("libraries of %s: %w", path, err)
			}
			loader = strings.TrimRight(string(b), "\x00")
		}
	}
	if loader == "" {
		loader = defaultLoader
		dynamic = dynamic && f.Type == elf.ET_DYN && needsAny(f) // a static program that can be moved has a dynamic section as well
	}
	return loader, dynamic, nil
}

func needsAny(f *elf.File) bool {
	libs, err := f.ImportedLibraries()
	return err == nil && len(libs) > 0
}
