package vmmtest

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/forkd/forkd/internal/vmm"
)

// What a machine keeps in its run directory.
const (
	controlSocket = "control.sock"
	consoleFile   = "console.log"
	exitFile      = "exit"
)

// ports are the guest ports of a machine.
var ports = []uint32{vmm.PortControl, vmm.PortData}

func portSocket(port uint32) string { return "port-" + strconv.Itoa(int(port)) + ".sock" }

func machineFiles() []string {
	names := []string{controlSocket, consoleFile, exitFile}
	for _, port := range ports {
		names = append(names, portSocket(port))
	}
	return names
}

// removeFiles removes what a machine left in its directory, which may be gone already.
func removeFiles(dir string) error {
	var errs []error
	for _, name := range machineFiles() {
		if err := os.Remove(filepath.Join(dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// inDir calls do with a short path of a socket in dir: the kernel allows 107 bytes, and a test's directory is often longer.
func inDir(dir, name string, do func(path string) error) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return do(fmt.Sprintf("/proc/self/fd/%d/%s", d.Fd(), name))
}

// listen binds a socket in dir and returns it as a file that a machine can inherit.
func listen(dir, name string) (*os.File, error) {
	var file *os.File
	err := inDir(dir, name, func(path string) error {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			return err
		}
		defer l.Close()
		l.SetUnlinkOnClose(false)
		file, err = l.File()
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("listen on %s in %s: %w", name, dir, err)
	}
	return file, nil
}

// dial connects to a socket in dir.
func dial(ctx context.Context, dir, name string) (*net.UnixConn, error) {
	var conn *net.UnixConn
	err := inDir(dir, name, func(path string) error {
		c, err := (&net.Dialer{Timeout: time.Minute}).DialContext(ctx, "unix", path)
		if err != nil {
			return err
		}
		conn = c.(*net.UnixConn)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("connect to %s in %s: %w", name, dir, err)
	}
	return conn, nil
}
