package image

import (
	"bytes"
	"compress/gzip"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"strings"

	"github.com/klauspost/compress/zstd"
)

// moduleTree is the modules directory of one kernel version.
//
// Dependencies are read from the modules themselves: modules.dep says no more, and is not there before depmod ran, which it has not
// in a package that was only unpacked.
type moduleTree struct {
	version string
	files   map[string]string // module name → path
	builtin map[string]bool
	loaded  map[string]module // what was read already
	unxz    func(path string) ([]byte, error)
}

// module is one that goes into the initramfs.
type module struct {
	name  string
	data  []byte   // uncompressed
	needs []string // names of what must be loaded before it
}

// openModules reads the names of what is in dir: the modules of that version, with modules.builtin, as they are below lib/modules.
// unxz unpacks .ko.xz files.
func openModules(dir, version string, unxz func(path string) ([]byte, error)) (*moduleTree, error) {
	t := &moduleTree{version: version, files: map[string]string{}, builtin: map[string]bool{}, loaded: map[string]module{}, unxz: unxz}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name, ok := moduleName(d.Name()); ok && !d.IsDir() {
			t.files[name] = path
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list modules: %w", err)
	}
	list, err := readRegular(filepath.Join(dir, "modules.builtin"))
	if err != nil {
		return nil, fmt.Errorf("%w: list built-in modules: %w", ErrInvalid, err)
	}
	for line := range strings.Lines(string(list)) {
		if name, ok := moduleName(filepath.Base(strings.TrimSpace(line))); ok {
			t.builtin[name] = true
		}
	}
	return t, nil
}

// moduleName is the kernel's name for the module in a file, which spells - as _.
func moduleName(file string) (string, bool) {
	stem, ext, ok := strings.Cut(file, ".ko")
	switch ext {
	case "", ".gz", ".xz", ".zst":
		return strings.ReplaceAll(stem, "-", "_"), ok && stem != ""
	}
	return "", false
}

// errNoModule means that a kernel has something neither as a module nor built in.
var errNoModule = errors.New("neither a module nor built in")

// closure returns the modules to load, in order, for those named; what is built in is left out. Missing optional ones are left out
// too.
func (t *moduleTree) closure(required, optional []string) ([]module, error) {
	var order []module
	state := map[string]int{} // 1: being visited, 2: in order
	var visit func(name string) error
	visit = func(name string) error {
		if t.builtin[name] || state[name] == 2 {
			return nil
		}
		if state[name] == 1 {
			return fmt.Errorf("module %s depends on itself", name)
		}
		state[name] = 1
		m, err := t.read(name)
		if err != nil {
			return err
		}
		for _, need := range m.needs {
			if err := visit(need); err != nil {
				return fmt.Errorf("module %s needs %s: %w", name, need, err)
			}
		}
		state[name] = 2
		order = append(order, m)
		return nil
	}
	for _, name := range required {
		if err := visit(name); err != nil {
			return nil, fmt.Errorf("kernel %s can't run a guest: %s: %w", t.version, name, err)
		}
	}
	for _, name := range optional {
		if err := visit(name); err != nil && !errors.Is(err, errNoModule) {
			return nil, fmt.Errorf("kernel %s: %s: %w", t.version, name, err)
		}
	}
	return order, nil
}

func (t *moduleTree) read(name string) (module, error) {
	if m, ok := t.loaded[name]; ok {
		return m, nil
	}
	path, ok := t.files[name]
	if !ok {
		return module{}, errNoModule
	}
	data, err := t.readFile(path)
	if err != nil {
		return module{}, fmt.Errorf("read module %s: %w", path, err)
	}
	info, err := readModinfo(data)
	if err != nil {
		return module{}, fmt.Errorf("module %s: %w", path, err)
	}
	if info.kernel != t.version {
		return module{}, fmt.Errorf("module %s is for kernel %s, not for %s", path, info.kernel, t.version)
	}
	var have []string
	for _, need := range info.needs {
		if _, ok := t.files[need.name]; ok || !need.soft {
			have = append(have, need.name)
		}
	}
	m := module{name: name, data: data, needs: have}
	t.loaded[name] = m
	return m, nil
}

type moduleNeed struct {
	name string
	soft bool // it may be missing
}

// modinfo is what a module says of itself.
type modinfo struct {
	kernel string // the version it was built for
	needs  []moduleNeed
}

// readModinfo reads the "vermagic", "depends" and "softdep=pre:" entries of a module's .modinfo section.
func readModinfo(ko []byte) (modinfo, error) {
	var info modinfo
	f, err := elf.NewFile(bytes.NewReader(ko))
	if err != nil {
		return info, fmt.Errorf("not a kernel module: %w", err)
	}
	section := f.Section(".modinfo")
	if section == nil {
		return info, errors.New("not a kernel module: it has no .modinfo section")
	}
	entries, err := section.Data()
	if err != nil {
		return info, fmt.Errorf("read .modinfo: %w", err)
	}
	for entry := range strings.SplitSeq(string(entries), "\x00") {
		key, value, _ := strings.Cut(entry, "=")
		switch key {
		case "vermagic":
			info.kernel, _, _ = strings.Cut(value, " ")
		case "depends":
			for name := range strings.SplitSeq(value, ",") {
				if name != "" {
					info.needs = append(info.needs, moduleNeed{strings.ReplaceAll(name, "-", "_"), false})
				}
			}
		case "softdep":
			info.needs = append(info.needs, softNeeds(value)...)
		}
	}
	return info, nil
}

// softNeeds parses "pre: a b post: c": what follows pre is loaded before.
func softNeeds(value string) []moduleNeed {
	var needs []moduleNeed
	pre := false
	for word := range strings.FieldsSeq(value) {
		if strings.HasSuffix(word, ":") {
			pre = word == "pre:"
			continue
		}
		if pre {
			needs = append(needs, moduleNeed{strings.ReplaceAll(word, "-", "_"), true})
		}
	}
	return needs
}

func readRegular(path string) ([]byte, error) {
	f, err := openRegular(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(f)
}

// readFile reads a module and unpacks it by its file name. Memory is bounded: no module is larger than 256 MiB.
func (t *moduleTree) readFile(path string) ([]byte, error) {
	const limit = 256 << 20
	if filepath.Ext(path) == ".xz" {
		return t.unxz(path)
	}
	raw, err := readRegular(path)
	if err != nil {
		return nil, err
	}
	var r io.Reader = bytes.NewReader(raw)
	switch filepath.Ext(path) {
	case ".gz":
		r, err = gzip.NewReader(r)
	case ".zst":
		var z *zstd.Decoder
		if z, err = zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(limit)); err == nil {
			defer z.Close()
			r = z
		}
	}
	if err != nil {
		return nil, err
	}
	data, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err == nil && len(data) > limit {
		err = fmt.Errorf("more than %d bytes", limit)
	}
	return data, err
}
