package agent

import (
	"errors"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/guest/agentproto"
)

const hostsMark = " # forkd"

// writeIdentityFiles writes the files under root that name a machine.
func writeIdentityFiles(root string, req *agentproto.Identity) error {
	if req.Hostname != "" {
		if err := writeFile(root, "etc", "hostname", req.Hostname+"\n"); err != nil {
			return err
		}
		if err := nameInHosts(root, req.Hostname); err != nil {
			return err
		}
	}
	if req.MachineID != "" {
		if err := writeFile(root, "etc", "machine-id", req.MachineID+"\n"); err != nil {
			return err
		}
	}
	return writeFile(root, "run/forkd", "instance-id", req.InstanceID+"\n")
}

// nameInHosts makes the host name resolve, in a line of our own that replaces the one of the machine this one was forked from.
func nameInHosts(root, hostname string) error {
	path := filepath.Join(root, "etc/hosts")
	old, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return errors.New("can't read /etc/hosts: " + err.Error())
	}
	text := string(old)
	if text == "" {
		text = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
	}
	var b strings.Builder
	for line := range strings.Lines(text) {
		if strings.HasSuffix(strings.TrimRight(line, "\n"), hostsMark) {
			continue
		}
		b.WriteString(line)
		if !strings.HasSuffix(line, "\n") {
			b.WriteByte('\n')
		}
	}
	b.WriteString("127.0.1.1\t" + hostname + hostsMark + "\n")
	return writeFile(root, "etc", "hosts", b.String())
}

// writeFile replaces what a file says with one write, so that a reader sees the old or the new text, and without a new file, which on an
// overlay takes the kernel much longer.
func writeFile(root, dir, name, text string) error {
	path := filepath.Join(root, dir, name)
	flags := unix.O_WRONLY | unix.O_CREAT | unix.O_CLOEXEC
	fd, err := unix.Open(path, flags, 0o644)
	if err == unix.ENOENT {
		if mkErr := os.MkdirAll(filepath.Join(root, dir), 0o755); mkErr == nil {
			fd, err = unix.Open(path, flags, 0o644)
		}
	}
	if err != nil {
		return errors.New("can't open /" + dir + "/" + name + ": " + err.Error())
	}
	defer unix.Close(fd)
	n, err := unix.Write(fd, []byte(text))
	if err == nil && n < len(text) {
		err = unix.ENOSPC
	}
	if err == nil {
		err = unix.Ftruncate(fd, int64(n))
	}
	if err != nil {
		return errors.New("can't write /" + dir + "/" + name + ": " + err.Error())
	}
	return nil
}
