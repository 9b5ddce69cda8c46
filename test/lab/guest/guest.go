// Package guest is the lab's end inside: a service that runs the commands it is sent over virtio ports, each in a control group of its own,
// and sends back what they print and how they end. When a command ends so does all that it started.
//
// It is for the lab's own root file system. The guests of forkd have an agent of another kind (internal/guest).
package guest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/test/lab/wire"
)

// What host and guest agree upon.
const (
	PortPrefix = "lab."      // begins the names of the ports commands come over
	WorkDir    = "/work"     // on the scratch disk
	scratch    = "/dev/vdb"  // empty at each boot
	mail       = "/dev/vdc"  // what the host writes is read there
	given      = "/dev/vdd"  // files that the host gave at boot; may be missing
	BinDir     = "/work/bin" // first in the PATH
	DiskDir    = "/mnt"      // where those files are
)

const cgroups = "/sys/fs/cgroup"

// Run serves until ctx ends or the last port is closed.
func Run(ctx context.Context) error {
	if err := errors.Join(mountScratch(ctx), mountDisk(ctx)); err != nil {
		return err
	}
	group, err := ownGroup()
	if err != nil {
		return err
	}
	ports, err := openPorts()
	if err != nil {
		return err
	}
	// Past the page cache, which would return what was there before.
	box, err := os.OpenFile(mail, os.O_RDONLY|unix.O_DIRECT, 0)
	if err != nil {
		return fmt.Errorf("mailbox: %w", err)
	}
	defer box.Close()
	var wg sync.WaitGroup
	for i, f := range ports {
		buf, err := unix.Mmap(-1, 0, wire.MaxPayload, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
		if err != nil {
			return fmt.Errorf("buffer for the mailbox: %w", err)
		}
		s := &server{port: f, mail: box, buf: buf, group: filepath.Join(group, fmt.Sprintf("port%d", i))}
		wg.Go(func() { s.serve(ctx) })
	}
	wg.Wait()
	return nil
}

// mountScratch makes a file system on the scratch disk, which is new at each boot.
func mountScratch(ctx context.Context) error {
	for _, args := range [][]string{
		{"mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-E", "lazy_itable_init=1,nodiscard", scratch},
		{"mount", "-o", "discard,noatime", scratch, WorkDir},
		{"mkdir", "-p", BinDir},
	} {
		if out, err := exec.CommandContext(ctx, args[0], args[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("scratch disk: %s: %w: %s", args[0], err, out)
		}
	}
	return nil
}

// mountDisk mounts the disk with files that the host gave, if there is one.
func mountDisk(ctx context.Context) error {
	if _, err := os.Stat(given); err != nil {
		return nil
	}
	if out, err := exec.CommandContext(ctx, "mount", "-t", "erofs", "-o", "ro", given, DiskDir).CombinedOutput(); err != nil {
		return fmt.Errorf("disk with files: %w: %s", err, out)
	}
	return nil
}

// ownGroup returns the control group of this service, made ready for groups below it: a group with processes of its own can't give
// controllers to others (the kernel's Documentation/admin-guide/cgroup-v2.rst, "no internal process constraint").
func ownGroup() (string, error) {
	b, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", fmt.Errorf("own control group: %w", err)
	}
	path, ok := strings.CutPrefix(strings.TrimSpace(string(b)), "0::")
	if !ok {
		return "", fmt.Errorf("own control group: %q is not of version 2", b)
	}
	group := filepath.Join(cgroups, path)
	self := filepath.Join(group, "service")
	if err := os.Mkdir(self, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return "", fmt.Errorf("own control group: %w", err)
	}
	if err := os.WriteFile(filepath.Join(self, "cgroup.procs"), []byte("0"), 0); err != nil {
		return "", fmt.Errorf("move to %s: %w", self, err)
	}
	return group, giveControllers(group)
}

// giveControllers lets the groups below have all controllers that this one has.
func giveControllers(group string) error {
	b, err := os.ReadFile(filepath.Join(group, "cgroup.controllers"))
	if err != nil {
		return fmt.Errorf("controllers: %w", err)
	}
	for name := range strings.FieldsSeq(string(b)) {
		if err := os.WriteFile(filepath.Join(group, "cgroup.subtree_control"), []byte("+"+name), 0); err != nil {
			return fmt.Errorf("controller %s: %w", name, err)
		}
	}
	return nil
}

// openPorts opens the virtio ports by their names; there may be no udev that makes links for them.
func openPorts() ([]*os.File, error) {
	names, err := filepath.Glob("/sys/class/virtio-ports/*/name")
	if err != nil {
		return nil, err
	}
	var ports []*os.File
	for _, path := range names {
		name, err := os.ReadFile(path)
		if err != nil || !strings.HasPrefix(string(name), PortPrefix) {
			continue
		}
		f, err := os.OpenFile(filepath.Join("/dev", filepath.Base(filepath.Dir(path))), os.O_RDWR, 0)
		if err != nil {
			return nil, fmt.Errorf("open port: %w", err)
		}
		ports = append(ports, f)
	}
	if len(ports) == 0 {
		return nil, errors.New("this machine has no ports for commands: is it a lab?")
	}
	return ports, nil
}

// server runs the commands of one port, one after the other.
type server struct {
	port  *os.File
	mail  *os.File
	buf   []byte // for reads of mail; of its own pages, as direct reads want it
	group string // the commands' control groups are named after this

	mu sync.Mutex // of writing to the port
}

func (s *server) send(kind wire.Kind, payload []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return wire.Write(s.port, kind, payload)
}

// serve reads frames and runs commands until the port is closed.
func (s *server) serve(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	frames := make(chan wire.Frame)
	go func() {
		defer cancel()
		for {
			f, err := wire.Read(s.port)
			if err != nil {
				fmt.Fprintln(os.Stderr, "port:", err)
				return
			}
			select {
			case frames <- f:
			case <-ctx.Done():
				return
			}
		}
	}()
	for n := 0; ; n++ {
		select {
		case f := <-frames:
			if f.Kind != wire.Start {
				continue // for a command that has ended
			}
			res := s.run(ctx, f.Payload, frames, fmt.Sprintf("%s.%d", s.group, n))
			s.mu.Lock()
			err := wire.WriteJSON(s.port, wire.Exit, res)
			s.mu.Unlock()
			if err != nil {
				return
			}
		case <-ctx.Done():
			return
		}
	}
}
