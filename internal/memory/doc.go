// Package memory is everything forkd does with guest memory outside a monitor: resident images, layers of changed pages, and the
// bookkeeping that shares them between sandboxes.
//
// # Resident images
//
// A snapshot's memory lives in sealed memfds. Every child maps the base MAP_PRIVATE and, over it, the extents of the layers that
// the snapshot's chain adds; all children, siblings and cousins share these pages until they write to them. Nothing that is sealed
// is ever written again, so a mapping can't change under a running guest.
//
//	ram, _ := memory.New("parent", bytes)      // the parent's RAM, mapped shared while it boots
//	memory.Seal(ram)                           // after its monitor is gone
//	img, _ := memory.NewImage(ram)             // a base
//	tip, _ := img.Derive(memory.Layer{...})    // a branch: the same base, one layer more
//
// An [Image] owns its files; images that were derived from one another hold each file once, until the last of them is closed. A
// [Cache] keeps images resident, loads each once however many ask, and evicts unused ones when they exceed a budget.
//
// # Extents
//
// An [Extent] is a run of 4 KiB pages. Slices of extents are "normal" when they are sorted, disjoint, and neither empty nor
// adjacent; the functions on them take normal slices (see [Normalize]) and return normal slices.
//
// # Windows
//
// The write-protect window of a live branch, the adoption of a userfaultfd, and mapping layers into a monitor live here too, since
// they are the same for every engine.
//
// This package starts no monitors, knows nothing of engines, and writes nothing to disk: package snapshot does that.
package memory
