package main

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/forkd/forkd/internal/confine"
	"github.com/forkd/forkd/internal/vmm/firecracker"
	"github.com/forkd/forkd/internal/vmm/qemu"
)

// checkJailer refuses a jailer that could not be used for every machine: it was asked for, so nothing runs without.
func (f *daemonFlags) checkJailer(ctx context.Context, users *confine.Users, log *slog.Logger) error {
	if f.Jailer == "" {
		return nil
	}
	refuse := func(why, hint string) error {
		return &codedError{code: exitUsage, err: fmt.Errorf("--jailer %s: %s", f.Jailer, why), hint: hint}
	}
	switch {
	case f.Engine != engineFirecracker:
		return refuse("with --engine "+f.Engine+" it may not be Firecracker that runs machines, and the jailer starts nothing else", "give --engine firecracker as well, or leave --jailer out")
	case f.Accel == qemu.AccelTCG:
		return refuse("with --accel tcg machines are emulated, and Firecracker doesn't", "leave one of them out")
	case users == nil:
		return refuse("machines are not confined (--confine "+f.Confine+", or the daemon is not root), and the jailer needs root", "run the daemon as root, with --confine auto or require")
	}
	version, err := firecracker.CheckJailer(ctx, f.Firecracker, f.Jailer)
	if err != nil {
		return refuse(err.Error(), "the jailer and Firecracker come in one archive of a release: give both of them from there")
	}
	log.Info("each Firecracker is started through its jailer", "jailer", f.Jailer, "version", version)
	return nil
}
