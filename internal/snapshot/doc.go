// Package snapshot keeps frozen machines on disk: immutable, digested, published atomically.
//
// # What is on disk
//
//	<dir>/<id>/manifest.json   what the machine is and what is needed to restore it, with the manifest's own digest
//	<dir>/<id>/memory.index    which pages are stored, and a SHA-256 for each chunk of 1 MiB
//	<dir>/<id>/memory          the stored pages, packed one behind the other
//	<dir>/<id>/device-state    what the engine saved
//	<dir>/.staging-*           being written; removed by the next Open unless its writer lives
//	<dir>/.trash-*             removed snapshots on their way out
//
// A snapshot without a parent stores all pages that are not zero. One with a parent (a layer) stores only the pages it was given,
// and for pages of zeros just the fact. In both cases the pages are packed, not sparse at their guest offsets: the file is written
// and read in one sequential run, its length says whether it is whole, every tool copies it without knowing about holes, a layer
// of scattered pages does not fragment the file system, and chunks of equal size keep all cores busy when it is verified. The
// index is a file of its own so that manifests stay small: listing snapshots reads a few KiB each.
//
// # Publishing
//
//	st, _ := store.Stage(id)
//	defer st.Abort()                      // a no-op after Publish
//	st.WriteMemory(ctx, ram, nil)         // or the extents of a layer
//	st.WriteDevice(ctx, state)
//	m, err := st.Publish(ctx, manifest)   // fsync, rename, fsync: all of it or nothing
//
// Nothing published is ever rewritten. Digests are made once, while writing, and checked whenever memory is loaded: a fork of a
// resident image never hashes anything.
//
// # What it is not
//
// This package knows no tags, no sandboxes and no engines; it compares a manifest with what an engine says of itself (see
// [Compat]) and no more. Whether a snapshot is in use is its caller's to know. Moving snapshots between machines is in package
// snapshot/pack.
package snapshot
