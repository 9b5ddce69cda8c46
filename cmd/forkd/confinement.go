package main

import (
	"cmp"
	"fmt"
	"log/slog"
	"os"

	"github.com/forkd/forkd/internal/confine"
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
