package sandbox

import "github.com/forkd/forkd/internal/memory"

// Failpoints: each stands behind a step that outlives a crash of the daemon. internal/failpoint makes them fail or kill the process.
const (
	pointSnapshotRecorded  = "sandbox.snapshot.recorded"  // the tag is taken
	pointSnapshotBooted    = "sandbox.snapshot.booted"    // the parent's process runs
	pointSnapshotWarm      = "sandbox.snapshot.warm"      // readiness and warm-up are done
	pointSnapshotSaved     = "sandbox.snapshot.saved"     // the device state is saved, the parent still lives
	pointSnapshotFrozen    = "sandbox.snapshot.frozen"    // the parent is gone
	pointSnapshotStaged    = "sandbox.snapshot.staged"    // memory and device state are in the staging directory
	pointSnapshotPublished = "sandbox.snapshot.published" // the directory has its name
	pointSnapshotReady     = "sandbox.snapshot.ready"     // the record says so

	pointForkRecorded   = "sandbox.fork.recorded"   // the sandbox is recorded as starting
	pointForkPrepared   = "sandbox.fork.prepared"   // its monitor runs
	pointForkLoaded     = "sandbox.fork.loaded"     // it holds the device state
	pointForkIdentified = "sandbox.fork.identified" // its agent acknowledged its identity
	pointForkRunning    = "sandbox.fork.running"    // it is recorded as running

	pointBranchRecorded  = "sandbox.branch.recorded"  // the tag is taken
	pointBranchPaused    = "sandbox.branch.paused"    // the source stands still
	pointBranchSaved     = "sandbox.branch.saved"     // its device state is saved
	pointBranchCaptured  = "sandbox.branch.captured"  // it goes on, and the snapshot can be forked
	pointBranchStaged    = "sandbox.branch.staged"    // memory and device state are in the staging directory
	pointBranchPublished = "sandbox.branch.published" // the directory has its name
	pointBranchReady     = "sandbox.branch.ready"     // the record says so

	pointDiffRecorded   = "sandbox.diff.recorded"   // as for a snapshot
	pointDiffPrepared   = "sandbox.diff.prepared"   // as for a fork
	pointDiffLoaded     = "sandbox.diff.loaded"     //
	pointDiffIdentified = "sandbox.diff.identified" //
	pointDiffFrozen     = "sandbox.diff.frozen"     // the steps are done and what they changed is captured
	pointDiffStaged     = "sandbox.diff.staged"     // as for a snapshot
	pointDiffPublished  = "sandbox.diff.published"  //
	pointDiffReady      = "sandbox.diff.ready"      //

	pointCompactRecorded  = "sandbox.compact.recorded"  // as for a snapshot
	pointCompactPublished = "sandbox.compact.published" //
	pointCompactReady     = "sandbox.compact.ready"     //

	pointSuspendRecorded  = "sandbox.suspend.recorded"  // the state is recorded as one that is being written
	pointSuspendCaptured  = "sandbox.suspend.captured"  // the sandbox stands still, its state is in memory
	pointSuspendStaged    = "sandbox.suspend.staged"    // the state is in the staging directory
	pointSuspendPublished = "sandbox.suspend.published" // the directory has its name
	pointSuspendMarked    = "sandbox.suspend.marked"    // the sandbox is recorded as suspended; its machine lives
	pointSuspendEnded     = "sandbox.suspend.ended"     // the machine is gone; the state before is there still

	pointResumePrepared   = "sandbox.resume.prepared"   // as for a fork
	pointResumeLoaded     = "sandbox.resume.loaded"     //
	pointResumeIdentified = "sandbox.resume.identified" //
	pointResumeRunning    = "sandbox.resume.running"    //

	pointPoolPrepared   = "sandbox.pool.prepared"   // as for a fork
	pointPoolLoaded     = "sandbox.pool.loaded"     //
	pointPoolIdentified = "sandbox.pool.identified" //
	pointPoolReady      = "sandbox.pool.ready"      // the member is exercised and paused

	pointClaimRecorded   = "sandbox.claim.recorded"   // the sandbox is recorded as starting
	pointClaimIdentified = "sandbox.claim.identified" // its agent acknowledged its own identity
	pointClaimRunning    = "sandbox.claim.running"    // it is recorded as running

	pointKillRecorded = "sandbox.kill.recorded" // the end and its reason are recorded
	pointKillEnded    = "sandbox.kill.ended"    // the process and its directory are gone
	pointKillRemoved  = "sandbox.kill.removed"  // the record is gone

	pointNetworkRecorded = "sandbox.network.recorded" // the policy is; the kernel holds the one before
	pointNetworkHeld     = "sandbox.network.held"     // the kernel holds it

	pointDeleteRecorded = "sandbox.delete.recorded" // the snapshot is recorded as going
	pointDeleteRemoved  = "sandbox.delete.removed"  // its directory is gone
)

// Points returns the names of all failpoints of this package, and of those of internal/memory that it passes.
func Points() []string {
	return append(memory.Points(),
		pointSnapshotRecorded, pointSnapshotBooted, pointSnapshotWarm, pointSnapshotSaved, pointSnapshotFrozen, pointSnapshotStaged,
		pointSnapshotPublished, pointSnapshotReady,
		pointForkRecorded, pointForkPrepared, pointForkLoaded, pointForkIdentified, pointForkRunning,
		pointBranchRecorded, pointBranchPaused, pointBranchSaved, pointBranchCaptured, pointBranchStaged, pointBranchPublished, pointBranchReady,
		pointDiffRecorded, pointDiffPrepared, pointDiffLoaded, pointDiffIdentified, pointDiffFrozen, pointDiffStaged, pointDiffPublished, pointDiffReady,
		pointCompactRecorded, pointCompactPublished, pointCompactReady,
		pointSuspendRecorded, pointSuspendCaptured, pointSuspendStaged, pointSuspendPublished, pointSuspendMarked, pointSuspendEnded,
		pointResumePrepared, pointResumeLoaded, pointResumeIdentified, pointResumeRunning,
		pointPoolPrepared, pointPoolLoaded, pointPoolIdentified, pointPoolReady,
		pointClaimRecorded, pointClaimIdentified, pointClaimRunning,
		pointKillRecorded, pointKillEnded, pointKillRemoved,
		pointNetworkRecorded, pointNetworkHeld,
		pointDeleteRecorded, pointDeleteRemoved,
	)
}
