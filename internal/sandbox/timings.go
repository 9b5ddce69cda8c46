package sandbox

import "time"

// Timing is how long something took, for metrics. What failed is not told: it is counted by its error.
type Timing struct {
	Kind   TimingKind
	Engine string
	How    string // the path of a fork, the mode of a branch; else ""
	Took   time.Duration
}

// TimingKind says what took its time.
type TimingKind string

// Kinds of timings.
const (
	TimeReady       TimingKind = "ready"        // from a fork's turn to the acknowledged identity
	TimeBranchPause TimingKind = "branch_pause" // how long a branched sandbox stood still
	TimeBranch      TimingKind = "branch"       // from the request to the snapshot on disk
	TimeSuspend     TimingKind = "suspend"
	TimeResume      TimingKind = "resume" // to the acknowledged identity
	TimeExec        TimingKind = "exec"
	TimeEval        TimingKind = "eval"
)

// timed tells how long something of a snapshot's machines took.
func (m *Manager) timed(kind TimingKind, f *frozen, how string, took time.Duration) {
	if m.cfg.Timings != nil {
		m.cfg.Timings(Timing{Kind: kind, Engine: f.manifest.Engine.Engine, How: how, Took: took})
	}
}

// timedIn is timed for something in the guest of a sandbox.
func (m *Manager) timedIn(kind TimingKind, id string, took time.Duration) {
	if b, ok := m.live(id); ok {
		m.timed(kind, b.frozen, "", took)
	}
}
