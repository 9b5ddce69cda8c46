package transfer

import (
	"context"
	"crypto/ed25519"
	"fmt"
	"io"
	"time"

	"github.com/forkd/forkd/internal/failpoint"
	"github.com/forkd/forkd/internal/image"
	"github.com/forkd/forkd/internal/sandbox"
	"github.com/forkd/forkd/internal/snapshot"
	"github.com/forkd/forkd/internal/snapshot/pack"
)

// Domain is what moving snapshots needs of the domain. *sandbox.Manager has it.
type Domain interface {
	Snapshot(ctx context.Context, tag string) (sandbox.Snapshot, error)
	// Hold keeps a snapshot that is on disk, and what it rests on, from being deleted until release.
	Hold(ctx context.Context, tag string) (id string, release func(), err error)
	// AddSnapshot publishes a tag for a snapshot that was just unpacked into the store, and takes in what it rests on.
	AddSnapshot(ctx context.Context, tag, id string) error
	// TakeImage gives the caller an image that was just unpacked; fresh says that it was not here before.
	TakeImage(ctx context.Context, id string, fresh bool) error
	// ImageInUse reports by an error who needs an image.
	ImageInUse(id string) error
}

// Config is what a Service works with. It takes none of it over.
type Config struct {
	Snapshots  *snapshot.Store
	Images     *image.Store
	Domain     Domain         // over the same stores
	Failpoints *failpoint.Set // for tests; nil: none
}

// Service packs and unpacks. Its methods may be called concurrently.
type Service struct {
	store  *snapshot.Store
	images *image.Store
	domain Domain
	points *failpoint.Set
	holds  holds
}

// New returns a Service.
func New(cfg Config) *Service {
	return &Service{store: cfg.Snapshots, images: cfg.Images, domain: cfg.Domain, points: cfg.Failpoints, holds: holds{count: map[string]int{}}}
}

// Points returns the names of the failpoints of this package: each stands before a step that outlives a crash of the daemon.
func Points() []string {
	return []string{string(pack.StepJournal), string(pack.StepImage), string(pack.StepPublish), string(pack.StepAdmit), string(pack.StepDone)}
}

// Recover takes back what unpackings of a daemon that crashed had published in part. recorded tells of a snapshot whether the domain's
// database has it. Call it before anything uses the stores.
func Recover(ctx context.Context, store *snapshot.Store, images *image.Store, recorded func(id string) bool) error {
	return pack.Recover(ctx, store, &imageParts{store: images}, recorded)
}

// Head is what a pack of a snapshot begins with: a signature covers it, and by its digests all of the pack.
type Head struct {
	ID       string // of the snapshot
	Contents []byte // JSON, to be signed as it is
}

// Head returns what the pack of the snapshot with a tag will begin with.
func (s *Service) Head(ctx context.Context, tag string) (Head, error) {
	id, release, err := s.domain.Hold(ctx, tag)
	if err != nil {
		return Head{}, err
	}
	defer release()
	parts := s.parts()
	defer parts.release()
	contents, err := pack.Head(ctx, s.store, parts, id)
	if err != nil {
		return Head{}, packFault(err, "snapshot %s can't be packed", tag)
	}
	return Head{ID: id, Contents: contents}, nil
}

// Pack writes the snapshot with a tag, all it rests on, and its image to w. signature, made over Head's contents by pack.Sign, goes into the
// pack; nil leaves it unsigned. An error before the first byte leaves w untouched; after it, what was written is no valid pack.
func (s *Service) Pack(ctx context.Context, tag string, w io.Writer, signature []byte) error {
	id, release, err := s.domain.Hold(ctx, tag)
	if err != nil {
		return err
	}
	defer release()
	parts := s.parts()
	defer parts.release()
	_, err = pack.Pack(ctx, w, s.store, parts, id, pack.Options{Signature: signature})
	return packFault(err, "snapshot %s can't be packed", tag)
}

// UnpackRequest says what to do with a pack.
type UnpackRequest struct {
	Tag     string              // of the snapshot that was packed, here; "": its id
	Signers []ed25519.PublicKey // it must be signed by one of them; none: it need not be signed
}

// Unpacked is what came of it.
type Unpacked struct {
	Snapshot sandbox.Snapshot
	New      []string          // ids of the snapshots that were not here, root first
	Present  []string          // ids of those that were
	ImageID  string            // of the image it was booted from
	NewImage bool              // the image was not here
	SignedBy ed25519.PublicKey // nil: not signed
}

// Unpack reads a pack from r, verifies all of it, and gives the snapshot its tag. On an error nothing of it is left, whoever's fault it is.
func (s *Service) Unpack(ctx context.Context, r io.Reader, req UnpackRequest, tell func(sandbox.Progress)) (Unpacked, error) {
	tag := req.Tag
	if tag != "" {
		if err := s.free(ctx, tag); err != nil { // found out before all of it was sent, rather than after
			return Unpacked{}, err
		}
	}
	parts := s.parts()
	defer parts.release()
	res, err := pack.Unpack(ctx, r, s.store, parts, pack.UnpackOptions{
		RequireSignature: req.Signers,
		Progress:         throttled(tell),
		Hook:             func(step pack.Step) error { return s.points.Hit(ctx, string(step)) },
		Admit: func(ctx context.Context, m snapshot.Manifest) error {
			if tag == "" {
				tag = m.ID
			}
			return s.domain.AddSnapshot(ctx, tag, m.ID)
		},
	})
	if err != nil {
		return Unpacked{}, unpackFault(err)
	}
	out := Unpacked{New: res.Published, Present: res.Present, ImageID: res.Image, NewImage: res.NewImage, SignedBy: res.SignedBy}
	if err := s.domain.TakeImage(ctx, res.Image, res.NewImage); err != nil {
		return Unpacked{}, err
	}
	out.Snapshot, err = s.domain.Snapshot(ctx, tag)
	return out, err
}

// free checks that nothing has a tag. What failed may be no more than a memory: that is for the domain to say in the end.
func (s *Service) free(ctx context.Context, tag string) error {
	snap, err := s.domain.Snapshot(ctx, tag)
	switch {
	case err == nil && snap.Status == sandbox.StatusFailed:
		return nil
	case err == nil:
		return &sandbox.Error{Code: sandbox.CodeSnapshotExists, Message: fmt.Sprintf("a snapshot with the tag %s exists", tag),
			Hint: "delete it first, or choose another tag"}
	case sandbox.CodeOf(err) == sandbox.CodeSnapshotNotFound:
		return nil
	}
	return err
}

// tellEvery is how often somebody who waits wants to know.
const tellEvery = 200 * time.Millisecond

// throttled passes on what changed, not all of it.
func throttled(tell func(sandbox.Progress)) func(pack.Progress) {
	var last time.Time
	return func(p pack.Progress) {
		if now := time.Now(); tell != nil && (now.Sub(last) >= tellEvery || p.Done == p.Total) {
			last = now
			tell(sandbox.Progress{Step: "unpack", Detail: p.Member, Done: p.Done, Total: p.Total})
		}
	}
}
