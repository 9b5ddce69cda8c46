package snapshot

import (
	"fmt"
	"slices"
	"strings"

	"github.com/forkd/forkd/internal/hostcpu"
	"github.com/forkd/forkd/internal/vmm"
)

// IncompatibleError says why a snapshot can't be restored here. It is vmm.ErrIncompatible.
type IncompatibleError struct {
	Snapshot string // id
	Field    string
	Made     string // value the snapshot was made with
	Now      string // value here
	Advice   string
}

func (e *IncompatibleError) Error() string {
	return fmt.Sprintf("snapshot %s can't be restored here: %s is %q, the snapshot was made with %q: %s", e.Snapshot, e.Field, e.Now, e.Made, e.Advice)
}

// Unwrap makes the error a vmm.ErrIncompatible.
func (e *IncompatibleError) Unwrap() error { return vmm.ErrIncompatible }

// Compat reports whether an engine, as it is now, can restore a snapshot. The path of the engine's binary does not matter.
func Compat(m Manifest, now vmm.Info) error {
	const rebuild = "or make it anew here with `forkd snapshot rebuild`"
	fields := []struct{ name, made, now, advice string }{
		{"engine", m.Engine.Engine, now.Engine, "run the daemon with the engine " + m.Engine.Engine + ", " + rebuild},
		{"engine version", m.Engine.Version, now.Version, "install version " + m.Engine.Version + " of " + m.Engine.Engine + ", " + rebuild},
		{"accelerator", m.Engine.Accel, now.Accel, "move it to a host with " + m.Engine.Accel + ", " + rebuild},
		{"machine type", m.Engine.Machine, now.Machine,
			"use a version of forkd and " + m.Engine.Engine + " that has machine type " + m.Engine.Machine + ", " + rebuild},
		{"CPU vendor", m.Engine.CPUVendor, now.CPUVendor, "move it to a host with a processor of " + m.Engine.CPUVendor + ", " + rebuild},
		{"CPU family", m.Engine.CPUFamily, now.CPUFamily, "move it to a host whose processor is of family " + m.Engine.CPUFamily +
			", make snapshots that are to travel with --cpu-template, " + rebuild},
		{"CPU", m.Engine.CPU, now.CPU, "move it to a host with that CPU, " + rebuild},
	}
	for _, f := range fields {
		if f.made != f.now {
			return &IncompatibleError{Snapshot: m.ID, Field: f.name, Made: f.made, Now: f.now, Advice: f.advice}
		}
	}
	has := strings.Fields(now.CPUFeatures)
	for feature := range strings.FieldsSeq(m.Engine.CPUFeatures) {
		if !slices.Contains(has, feature) {
			return &IncompatibleError{Snapshot: m.ID, Field: "CPU feature " + feature, Made: "there", Now: "missing",
				Advice: "move it to a host whose processor has it, make snapshots that are to travel with --cpu-template, " + rebuild}
		}
	}
	if made := m.Engine.TSCkHz; made != now.TSCkHz && !hostcpu.Compatible(made, now.TSCkHz) {
		return &IncompatibleError{Snapshot: m.ID, Field: "TSC rate in kHz", Made: fmt.Sprint(m.Engine.TSCkHz), Now: fmt.Sprint(now.TSCkHz),
			Advice: "the guest's clock would run at the wrong speed: move it to a host with the same rate (within 0.1 %), " + rebuild}
	}
	return nil
}
