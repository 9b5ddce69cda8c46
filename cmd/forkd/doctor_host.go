package main

import (
	"cmp"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/forkd/forkd/internal/confine"
	"github.com/forkd/forkd/internal/hostcheck"
	"github.com/forkd/forkd/internal/limits"
)

// tryConfinement confines a program as a monitor is, and says how far that goes.
func (f *daemonFlags) tryConfinement(binary string) (level string, problem error) {
	decided, err := confine.Decide(confine.Mode(f.Confine), os.Geteuid())
	if err != nil || decided != confine.Full {
		return string(decided), err
	}
	path, err := exec.LookPath(binary)
	if err != nil {
		return string(decided), nil // another check says that it is missing
	}
	ids := confine.RangeFor(f.RunDir)
	ids.First = cmp.Or(f.UIDBase, ids.First)
	cell, err := confine.New(confine.Spec{Binary: path}, confine.NewUsers(ids))
	if err != nil {
		return "", err
	}
	defer cell.Close()
	return string(decided), cell.Try("--version")
}

// tryLimits makes control groups as the daemon does, and takes them back.
func (f *daemonFlags) tryLimits() (hostcheck.Limits, error) {
	root, err := limits.Open(limits.Options{RunDir: fmt.Sprintf("%s doctor %d", f.RunDir, os.Getpid()), Data: f.Data, Under: f.CgroupParent})
	if err != nil {
		return hostcheck.Limits{}, err
	}
	var l hostcheck.Limits
	l.Version, l.Dir = root.Where()
	if l.Dir != "" {
		l.Dir = filepath.Dir(l.Dir) // the daemon's own is beside it
	}
	l.Missing, l.Why = root.Missing()
	if err := root.Close(); err != nil {
		return l, err
	}
	return l, nil
}
