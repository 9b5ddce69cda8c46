package sandbox

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

	pointDeleteRecorded = "sandbox.delete.recorded" // the snapshot is recorded as going
	pointDeleteRemoved  = "sandbox.delete.removed"  // its directory is gone
)

// Points returns the names of all failpoints of this package.
func Points() []string {
	return []string{
		pointSnapshotRecorded, pointSnapshotBooted, pointSnapshotWarm, pointSnapshotSaved, pointSnapshotFrozen, pointSnapshotStaged,
		pointSnapshotPublished, pointSnapshotReady,
		pointForkRecorded, pointForkPrepared, pointForkLoaded, pointForkIdentified, pointForkRunning,
		pointPoolPrepared, pointPoolLoaded, pointPoolIdentified, pointPoolReady,
		pointClaimRecorded, pointClaimIdentified, pointClaimRunning,
		pointKillRecorded, pointKillEnded, pointKillRemoved,
		pointDeleteRecorded, pointDeleteRemoved,
	}
}
