package pack

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/snapshot"
)

// Step is a point at which publishing changes something on disk. A hook may stop it there.
type Step string

// The steps, in the order in which they are taken, besides those of the stores.
const (
	StepJournal Step = "unpack.journal" // before the journal is written
	StepImage   Step = "unpack.image"   // before the image gets its id
	StepPublish Step = "unpack.publish" // before each snapshot gets its id
	StepAdmit   Step = "unpack.admit"   // before the caller is asked to rely on it
	StepDone    Step = "unpack.done"    // before the journal goes, which makes it all final
)

const journalPrefix = ".unpack-"

// journal lists what is being published together. As long as it is there, all of it may have to be taken back.
type journal struct {
	Image     string   `json:"image,omitempty"` // empty: it was here before
	Snapshots []string `json:"snapshots"`       // root first
}

// publish gives everything its name, or nothing.
func (u *unpacker) publish() error {
	if u.image != nil {
		if err := u.image.Prepare(u.ctx); err != nil {
			return err
		}
	}
	manifests := map[string]snapshot.Manifest{}
	for _, s := range u.contents.Snapshots {
		manifests[s.Manifest.ID] = s.Manifest
	}
	if err := u.prepare(manifests); err != nil {
		return err
	}
	unlock, err := lockStore(u.store)
	if err != nil {
		return err
	}
	defer unlock()
	if err := u.settle(); err != nil {
		return err
	}
	return u.commit()
}

func (u *unpacker) prepare(manifests map[string]snapshot.Manifest) error {
	for _, st := range u.staged {
		if _, err := st.Prepare(u.ctx, manifests[st.ID()]); err != nil {
			return err
		}
	}
	return nil
}

// settle looks again at what is here: others may have published or removed something while we were reading.
//
// Preconditions: the store is locked.
func (u *unpacker) settle() error {
	for _, id := range u.result.Present {
		if _, err := u.store.Get(id); err != nil {
			return fmt.Errorf("snapshot %s was here and was removed meanwhile: unpack again: %w", id, err)
		}
	}
	for _, s := range u.contents.Snapshots {
		here, err := u.snapshotPresent(s.Manifest)
		if err != nil {
			return err
		}
		if here {
			u.drop(s.Manifest.ID)
		}
	}
	present, err := u.imagePresent()
	switch {
	case err != nil:
		return err
	case present && u.image != nil:
		err = u.image.Abort()
		u.image = nil
	case !present && u.image == nil:
		err = fmt.Errorf("image %s was here and was removed meanwhile: unpack again", u.contents.Image.ID)
	}
	return err
}

// drop gives up our copy of a snapshot that somebody else published meanwhile.
func (u *unpacker) drop(id string) {
	for i, st := range u.staged {
		if st.ID() == id {
			st.Abort()
			u.staged = append(u.staged[:i:i], u.staged[i+1:]...)
			u.result.Present = append(u.result.Present, id)
			return
		}
	}
}

// commit publishes under the protection of a journal.
//
// Preconditions: the store is locked, everything is prepared.
func (u *unpacker) commit() (err error) {
	if len(u.staged) == 0 && u.image == nil {
		return u.handOver()
	}
	j := journal{}
	if u.image != nil {
		j.Image = u.contents.Image.ID
	}
	for _, st := range u.staged {
		j.Snapshots = append(j.Snapshots, st.ID())
	}
	if err := u.step(StepJournal); err != nil {
		return err
	}
	file, err := j.write(u.store.Path())
	if err != nil {
		return err
	}
	var done journal // what has its name by now
	final := false
	defer func() {
		if err != nil && !final {
			err = errors.Join(err, done.undo(context.WithoutCancel(u.ctx), file, u.store, u.images))
		}
	}()
	if err := u.commitAll(&done); err != nil {
		return err
	}
	if err := u.step(StepAdmit); err != nil {
		return err
	}
	if err := u.handOver(); err != nil {
		return err
	}
	u.result.Published, u.result.NewImage = j.Snapshots, j.Image != ""
	final = u.opt.Admit != nil // a journal that stays changes nothing then: Recover asks
	if err := u.step(StepDone); err != nil {
		return err
	}
	if err := removeJournal(file); err != nil && !final {
		return err
	}
	return nil
}

// handOver tells the caller what it has now.
func (u *unpacker) handOver() (err error) {
	if u.result.Manifest, err = u.store.Get(u.contents.ID); err != nil || u.opt.Admit == nil {
		return err
	}
	return u.opt.Admit(u.ctx, u.result.Manifest)
}

func (u *unpacker) commitAll(done *journal) error {
	if u.image != nil {
		if err := u.step(StepImage); err != nil {
			return err
		}
		if err := u.image.Commit(); err != nil {
			return err
		}
		done.Image = u.contents.Image.ID
	}
	for _, st := range u.staged {
		if err := u.step(StepPublish); err != nil {
			return err
		}
		if err := st.Commit(); err != nil {
			return err
		}
		done.Snapshots = append(done.Snapshots, st.ID())
	}
	_, err := u.store.Chain(u.contents.ID)
	return err
}

func (u *unpacker) step(s Step) error {
	if u.opt.Hook == nil {
		return nil
	}
	return u.opt.Hook(s)
}

// write makes the journal durable.
func (j journal) write(dir string) (string, error) {
	data, err := json.Marshal(j)
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, journalPrefix+rand.Text())
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return "", err
	}
	_, err = f.Write(data)
	err = errors.Join(err, f.Sync(), f.Close(), syncDir(dir))
	if err != nil {
		return "", errors.Join(err, os.Remove(path))
	}
	return path, nil
}

func removeJournal(path string) error {
	return errors.Join(os.Remove(path), syncDir(filepath.Dir(path)))
}

// undo takes back what of a journal was published: the tip first, so that nothing ever rests on what is gone. The journal goes last.
func (j journal) undo(ctx context.Context, path string, store *snapshot.Store, images Images) error {
	for i := len(j.Snapshots) - 1; i >= 0; i-- {
		if err := store.Remove(j.Snapshots[i]); err != nil && !errors.Is(err, snapshot.ErrNotFound) {
			return err
		}
	}
	if j.Image != "" {
		if err := images.Remove(ctx, j.Image); err != nil {
			return err
		}
	}
	return removeJournal(path)
}

// Recover takes back what unpackings that crashed had published in part, and leaves alone what was admitted (see UnpackOptions.Admit): that
// is told of the snapshot that was packed; nil: nothing was. Call it when a daemon starts, before anything uses the stores.
func Recover(ctx context.Context, store *snapshot.Store, images Images, admitted func(id string) bool) error {
	unlock, err := lockStore(store)
	if err != nil {
		return fmt.Errorf("recover unpackings: %w", err)
	}
	defer unlock()
	entries, err := os.ReadDir(store.Path())
	if err != nil {
		return fmt.Errorf("recover unpackings: %w", err)
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), journalPrefix) {
			continue
		}
		if err := recoverOne(ctx, filepath.Join(store.Path(), e.Name()), store, images, admitted); err != nil {
			return fmt.Errorf("recover unpacking %s: %w", e.Name(), err)
		}
	}
	return nil
}

func recoverOne(ctx context.Context, path string, store *snapshot.Store, images Images, admitted func(id string) bool) error {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var j journal
	if err := json.Unmarshal(data, &j); err != nil {
		return removeJournal(path) // it was not durable yet, so nothing was published under it
	}
	if n := len(j.Snapshots); n > 0 && admitted != nil && admitted(j.Snapshots[n-1]) {
		return removeJournal(path)
	}
	return j.undo(ctx, path, store, images)
}

// lockStore keeps other unpackings into a store, of this process and of others, from publishing at the same time.
func lockStore(store *snapshot.Store) (unlock func(), err error) {
	d, err := os.Open(store.Path())
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(d.Fd()), unix.LOCK_EX); err != nil {
		d.Close()
		return nil, fmt.Errorf("lock %s: %w", store.Path(), err)
	}
	return func() { d.Close() }, nil
}

func syncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

// sameManifest compares what two manifests say.
func sameManifest(a, b snapshot.Manifest) (bool, error) {
	x, err := a.Encode()
	if err != nil {
		return false, err
	}
	y, err := b.Encode()
	return bytes.Equal(x, y), err
}
