package image

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"
)

// The unprivileged user of a guest.
const (
	guestUser = "user"
	guestUID  = 1000
	guestHome = "home/user"

	// passwordDay dates all password entries, in days since 1970. 0 would mean that passwords have to be changed.
	passwordDay = 19000
)

// guestFiles replace what the packages or the host left.
var guestFiles = []struct {
	name string
	perm fs.FileMode
	text string
}{
	{"etc/hostname", 0o644, "localhost\n"},
	{"etc/hosts", 0o644, "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n"},
	{"etc/resolv.conf", 0o644, "# filled in when the guest has a network\n"},
	{"etc/machine-id", 0o444, ""}, // every guest gets its own
	{"etc/default/locale", 0o644, "LANG=C.UTF-8\n"},
	{"etc/sudoers.d/user", 0o440, guestUser + " ALL=(ALL:ALL) NOPASSWD: ALL\n"},
}

// dropped is what a fresh root has and a guest has no use for, or must not share with others.
var dropped = []string{
	"dev/*", "run/*", "tmp/*", "var/tmp/*",
	"var/lib/apt/lists/*", "var/cache/apt/*", "var/cache/debconf/*-old", "var/cache/ldconfig/*", "var/lib/dpkg/*-old",
	"var/log/*.log", "var/log/*/*.log", "var/log/apt/*", "var/log/btmp", "var/log/wtmp", "var/log/lastlog", "var/log/faillog",
	"etc/passwd-", "etc/group-", "etc/shadow-", "etc/gshadow-", "etc/subuid-", "etc/subgid-", "etc/.pwd.lock",
	"etc/apt/apt.conf.d/99mmdebstrap", "etc/ssh/ssh_host_*", "var/lib/dbus/machine-id", "var/lib/systemd/random-seed",
	"root/.bash_history", "root/.wget-hsts",
}

// customise makes a fresh Debian root a guest's: the user, the files above, and nothing that is the host's or this day's. Paths are
// confined to the tree, whatever links it has. start is when the packages began to be installed.
func customise(tree string, start time.Time) error {
	root, err := os.OpenRoot(tree)
	if err != nil {
		return fmt.Errorf("open root file system: %w", err)
	}
	defer root.Close()
	for _, pattern := range dropped {
		names, err := fs.Glob(root.FS(), pattern)
		if err != nil {
			return fmt.Errorf("clean %s: %w", pattern, err)
		}
		for _, name := range names {
			if err := root.RemoveAll(name); err != nil {
				return fmt.Errorf("clean %s: %w", name, err)
			}
		}
	}
	for _, f := range guestFiles {
		if err := replaceFile(root, f.name, []byte(f.text), f.perm); err != nil {
			return err
		}
	}
	if err := addUser(root); err != nil {
		return fmt.Errorf("add user %q: %w", guestUser, err)
	}
	return clampTimes(root, start)
}

// replaceFile writes a file anew, so that neither a link nor an old mode stays.
func replaceFile(root *os.Root, name string, data []byte, perm fs.FileMode) error {
	if err := root.MkdirAll(path.Dir(name), 0o755); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	if err := root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("write %s: %w", name, err)
	}
	if err := root.WriteFile(name, data, perm); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	if err := root.Chmod(name, perm); err != nil { // the umask is not to matter
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}

func addUser(root *os.Root) error {
	for _, add := range []struct{ file, line string }{
		{"etc/passwd", fmt.Sprintf("%s:x:%d:%d::/%s:/bin/bash", guestUser, guestUID, guestUID, guestHome)},
		{"etc/group", fmt.Sprintf("%s:x:%d:", guestUser, guestUID)},
		{"etc/shadow", fmt.Sprintf("%s:*:%d:0:99999:7:::", guestUser, passwordDay)},
		{"etc/gshadow", guestUser + ":!::"},
	} {
		if err := appendEntry(root, add.file, add.line); err != nil {
			return err
		}
	}
	if err := root.MkdirAll(guestHome, 0o755); err != nil {
		return err
	}
	skel, err := fs.Sub(root.FS(), "etc/skel")
	if err != nil {
		return err
	}
	entries, err := fs.ReadDir(skel, ".")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, e := range entries {
		if !e.Type().IsRegular() {
			continue
		}
		data, err := fs.ReadFile(skel, e.Name())
		if err != nil {
			return err
		}
		file := path.Join(guestHome, e.Name())
		if err := replaceFile(root, file, data, 0o644); err != nil {
			return err
		}
		if err := root.Lchown(file, guestUID, guestUID); err != nil {
			return err
		}
	}
	return root.Lchown(guestHome, guestUID, guestUID)
}

// appendEntry adds a line to a file of colon-separated records unless it has one of that name. Mode and owner stay.
func appendEntry(root *os.Root, file, line string) error {
	old, err := root.ReadFile(file)
	if err != nil {
		return err
	}
	name, _, _ := strings.Cut(line, ":")
	for l := range strings.Lines(string(old)) {
		if strings.HasPrefix(l, name+":") {
			return nil
		}
	}
	f, err := root.OpenFile(file, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(line + "\n")
	return errors.Join(err, f.Close())
}

// clampTimes dates everything written since start (the maintainer scripts' work and ours) with the newest time among what the
// packages brought, so that the same packages make the same tree. Older times are kept: Python's bytecode depends on them.
func clampTimes(root *os.Root, start time.Time) error {
	start = start.Truncate(time.Second)
	var newest time.Time
	var written []string
	err := fs.WalkDir(root.FS(), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		switch mtime := info.ModTime(); {
		case !mtime.Before(start):
			written = append(written, name)
		case mtime.After(newest):
			newest = mtime
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("date files: %w", err)
	}
	if newest.IsZero() {
		newest = time.Unix(0, 0)
	}
	for _, name := range written {
		if err := setTime(filepath.Join(root.Name(), filepath.FromSlash(name)), newest); err != nil {
			return fmt.Errorf("date file %s: %w", name, err)
		}
	}
	return nil
}
