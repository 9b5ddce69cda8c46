// Package pack moves a snapshot between machines as one portable file: its whole chain and the image it was booted from, each once.
//
// # Format
//
// A pack is a tar archive in one zstd stream. Its first member says what the rest is, in order and with sizes and digests, so that a
// reader knows each member before it comes and refuses anything else:
//
//	forkd-pack.json               contents: the image, and the manifests of the chain, root first
//	forkd-pack.sig                optional: an ed25519 signature over forkd-pack.json, and by its digests over everything
//	image/{kernel,initramfs,rootfs}
//	snapshots/<id>/index          which pages, and the digest of each chunk of 1 MiB
//	snapshots/<id>/memory         the pages, packed
//	snapshots/<id>/device-state
//
// The same snapshot packs to the same bytes with the same forkd: no times, owners or names of the host are in it.
//
// # Unpacking
//
// Unpack verifies every chunk as it streams by and writes only into staging directories. When all is verified and durable, the image
// and the chain get their names together: a journal lets [Recover] take back what a crash left half. Parts that are present already,
// under the same id with the same content, are verified and left alone; the same id with other content is refused.
//
// This package handles no tags: which name a snapshot goes by on the other machine is for its caller to say.
package pack
