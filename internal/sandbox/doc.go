// Package sandbox is the domain of forkd: snapshots are created here, children are forked from them, claimed from a pool, given
// an identity, watched, ended and, after a restart of the daemon, found again.
//
// # Vocabulary
//
// A parent boots from an image, is warmed up and frozen into a snapshot, which has an id and is named by a tag. A fork starts
// sandboxes from it. A pool holds children that were forked and exercised ahead; a fork claims one.
//
// A branch freezes a running sandbox, the source, into a snapshot while it goes on. What is frozen is an instant: memory and devices at one
// moment. It can be forked as soon as it is captured; on disk it rests on the nearest snapshot below it that is kept. A suspended sandbox has
// no machine: it is an instant on disk, its state, which belongs to it alone.
//
// # Promises
//
//   - A sandbox that Fork returned is ready: its agent acknowledged its own identity and fresh entropy. A child that can't is
//     killed and never seen.
//   - What is about to happen is persisted before it happens. Multi-step work unwinds through a cleanup stack, so that an error
//     leaves nothing; Recover repairs what a killed daemon left.
//   - A process is ended only when it is provably ours: pid, start time and our run directory.
//   - Running sandboxes outlive the daemon.
//   - The source of a branch goes on, whatever fails; one that can't is ended and says so.
//   - Nothing that a sandbox, running or suspended, or another snapshot needs is deleted.
//
// # Locks
//
// In the order in which they are taken, each only where none below it is held:
//
//  1. a sandbox's freeze token: it is being frozen, suspended or resumed, by one at a time;
//  2. a slot of a gate: branches, launches, claims, boots;
//  3. Manager.mu: what there is;
//  4. box.mu: what one sandbox is. It is held over writes to the database, so that what is persisted and what is shown change together, and a
//     write may wait for a disk. So it is not waited for with Manager.mu held, and Manager.mu is never taken with it held: what both need of a
//     sandbox is atomic, and who wants to know something of all sandboxes copies them first;
//  5. pool.mu, deadlines.mu, and the locks of gates, grants, the cache and the database, which are leaves.
//
// frozen.filesMu is held over reads from the disk and stands with 2. Recover, and the end of Shutdown, are alone and need not care. Events are
// emitted with none of 3 to 5 held: whoever receives them may ask back.
//
// # What this package is not
//
// It knows no engine, no HTTP and no SQL: it speaks to internal/vmm, internal/snapshot, internal/memory, internal/image,
// internal/guest/agentclient and internal/store, and is spoken to by internal/server.
package sandbox
