package main

import (
	"cmp"
	"fmt"
	"log/slog"
	"os"
	"strings"

	"github.com/forkd/forkd/internal/confine"
	"github.com/forkd/forkd/internal/limits"
)

// confinement decides whether monitors are confined, and says so when they are not. It returns the user ids they get; nil when they are not.
func (f *daemonFlags) confinement(log *slog.Logger) (*confine.Users, error) {
	level, err := confine.Decide(confine.Mode(f.Confine), os.Geteuid())
	if err != nil {
		return nil, fmt.Errorf("--confine %s: %w", f.Confine, err)
	}
	switch level {
	case confine.Full:
		ids := confine.RangeFor(f.RunDir)
		ids.First = cmp.Or(f.UIDBase, ids.First)
		return confine.NewUsers(ids), nil
	case confine.None:
		log.Warn("machines' monitors run as root and are not confined: a guest that breaks out of one has the host", "confine", f.Confine)
	default:
		log.Warn("machines' monitors run as this user and are not confined: a guest that breaks out of one can do what this user can", "confine", f.Confine)
	}
	return nil, nil
}

// groups finds what machines are limited by, and says which limits can't be kept.
func (f *daemonFlags) groups(log *slog.Logger) (*limits.Root, error) {
	groups, err := limits.Open(limits.Options{RunDir: f.RunDir, Data: f.Data, Under: f.CgroupParent})
	if err != nil {
		return nil, err
	}
	if kinds, why := groups.Missing(); len(kinds) > 0 {
		log.Warn("some limits of sandboxes can't be kept: a request that asks for one is refused", "missing", strings.Join(kinds, ","), "why", why)
	}
	return groups, nil
}
