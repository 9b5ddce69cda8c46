package agent

import (
	"bytes"
	"errors"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/guest/agentproto"
)

// hostsMark ends the line of /etc/hosts that is ours.
const hostsMark = " # forkd"

const defaultHosts = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"

// identityFiles writes the files under root that name a machine. They stay open and are written in place: opening one through the overlay
// runs much more of the kernel than writing it, and a fork pays for each part that runs for the first time.
type identityFiles struct {
	on                                 bool   // there are files to write
	root                               string // without a slash at its end
	hostname, hosts, machine, instance keptFile
	buf                                []byte
}

// keptFile is a file that stays open.
type keptFile struct {
	fd  int // valid when ino is not 0
	dev uint64
	ino uint64
}

// prepare opens the files ahead, so that no fork has to.
func (f *identityFiles) prepare() {
	if !f.on {
		return
	}
	_, _ = f.hostname.open(f.root, "/etc/hostname")
	_, _ = f.hosts.open(f.root, "/etc/hosts")
	_, _ = f.machine.open(f.root, "/etc/machine-id")
	_, _ = f.instance.open(f.root, "/run/forkd/instance-id")
}

func (f *identityFiles) write(req *agentproto.Identity) error {
	if req.Hostname != "" {
		f.buf = append(append(f.buf[:0], req.Hostname...), '\n')
		if err := f.hostname.replace(f.root, "/etc/hostname", f.buf); err != nil {
			return err
		}
		if err := f.nameInHosts(req.Hostname); err != nil {
			return err
		}
	}
	if req.MachineID != "" {
		f.buf = append(append(f.buf[:0], req.MachineID...), '\n')
		if err := f.machine.replace(f.root, "/etc/machine-id", f.buf); err != nil {
			return err
		}
	}
	f.buf = append(append(f.buf[:0], req.InstanceID...), '\n')
	return f.instance.replace(f.root, "/run/forkd/instance-id", f.buf)
}

// nameInHosts makes the host name resolve, in a line of our own that replaces the one of the machine this one was forked from.
func (f *identityFiles) nameInHosts(hostname string) error {
	const path = "/etc/hosts"
	size, err := f.hosts.open(f.root, path)
	if err != nil {
		return err
	}
	if size > 1<<20 {
		return errors.New(path + " is longer than 1 MiB")
	}
	buf := f.buf[:0]
	if int64(cap(buf)) < 2*size+512 {
		buf = make([]byte, 0, 2*size+512)
	}
	old := buf[:size]
	n, err := unix.Pread(f.hosts.fd, old, 0)
	if err != nil {
		return errors.New("can't read " + path + ": " + err.Error())
	}
	old = old[:n]
	if n == 0 {
		old = append(old, defaultHosts...)
	}
	text := withoutMarked(old)
	if len(text) > 0 && text[len(text)-1] != '\n' {
		text = append(text, '\n')
	}
	text = append(text, "127.0.1.1\t"...)
	text = append(text, hostname...)
	text = append(text, hostsMark...)
	text = append(text, '\n')
	f.buf = text
	return f.hosts.put(path, size, text)
}

// withoutMarked removes our line, in place.
func withoutMarked(text []byte) []byte {
	i := bytes.Index(text, []byte(hostsMark+"\n"))
	if i < 0 {
		return text
	}
	start := bytes.LastIndexByte(text[:i], '\n') + 1
	return append(text[:start], text[i+len(hostsMark)+1:]...)
}

// replace makes text the contents of a file.
func (k *keptFile) replace(root, path string, text []byte) error {
	size, err := k.open(root, path)
	if err != nil {
		return err
	}
	return k.put(path, size, text)
}

// open makes sure that the open file is the one that has the path now, and returns its size.
func (k *keptFile) open(root, path string) (size int64, err error) {
	var st unix.Stat_t
	if k.ino != 0 && unix.Stat(root+path, &st) == nil && st.Dev == k.dev && st.Ino == k.ino {
		return st.Size, nil
	}
	k.close()
	const flags = unix.O_RDWR | unix.O_CREAT | unix.O_CLOEXEC
	fd, err := unix.Open(root+path, flags, 0o644)
	if err == unix.ENOENT {
		if mkErr := mkdirAll(root+path[:strings.LastIndexByte(path, '/')], 0o755); mkErr == nil {
			fd, err = unix.Open(root+path, flags, 0o644)
		}
	}
	if err == nil {
		// By path, as above: an overlay has other numbers behind a descriptor than in front of it.
		if err = unix.Stat(root+path, &st); err != nil {
			unix.Close(fd)
		}
	}
	if err != nil {
		return 0, errors.New("can't open " + path + ": " + err.Error())
	}
	k.fd, k.dev, k.ino = fd, st.Dev, st.Ino
	return st.Size, nil
}

// put writes text with one write, so that a reader sees the old or the new one, and cuts what is longer.
func (k *keptFile) put(path string, size int64, text []byte) error {
	n, err := unix.Pwrite(k.fd, text, 0)
	if err == nil && n < len(text) {
		err = unix.ENOSPC
	}
	if err == nil && size > int64(n) {
		err = unix.Ftruncate(k.fd, int64(n))
	}
	if err != nil {
		return errors.New("can't write " + path + ": " + err.Error())
	}
	return nil
}

func (k *keptFile) close() {
	if k.ino != 0 {
		unix.Close(k.fd)
		k.ino = 0
	}
}

func (f *identityFiles) close() {
	for _, k := range []*keptFile{&f.hostname, &f.hosts, &f.machine, &f.instance} {
		k.close()
	}
}
