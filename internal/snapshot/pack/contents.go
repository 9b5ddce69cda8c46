package pack

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"unicode/utf8"

	"github.com/forkd/forkd/internal/snapshot"
)

// FormatVersion is the format this package writes. It reads no other yet.
const FormatVersion = 1

// Limits of what a pack may say of itself.
const (
	maxContentsBytes = 64 << 20
	maxMetaBytes     = 1 << 20
	maxImagePart     = 1 << 40
	maxSnapshots     = 1025 // a base and the layers over it
)

// Names of members.
const (
	contentsName  = "forkd-pack.json"
	signatureName = "forkd-pack.sig"
)

// Contents is the first member of a pack: all that is in it.
type Contents struct {
	FormatVersion int        `json:"format_version"`
	ID            string     `json:"id"` // the snapshot that was packed: the last of Snapshots
	Image         Image      `json:"image"`
	Snapshots     []Snapshot `json:"snapshots"` // the chain, root first
}

// Snapshot is what a pack says of one snapshot of the chain.
type Snapshot struct {
	Manifest   snapshot.Manifest `json:"manifest"` // portable
	IndexBytes int64             `json:"index_bytes"`
}

// Bytes is the size of all members but the first.
func (c Contents) Bytes() int64 {
	var n int64
	for _, m := range c.members() {
		n += m.bytes
	}
	return n
}

// member is a file of the archive that the contents promise.
type member struct {
	name  string
	bytes int64
}

// members are all members behind the contents and the signature, in order.
func (c Contents) members() []member {
	var out []member
	for _, p := range parts() {
		out = append(out, member{"image/" + string(p), c.Image.blob(p).Bytes})
	}
	for _, s := range c.Snapshots {
		dir := "snapshots/" + s.Manifest.ID + "/"
		out = append(out, member{dir + "index", s.IndexBytes}, member{dir + "memory", s.Manifest.Memory.DataBytes},
			member{dir + "device-state", s.Manifest.Device.Bytes})
	}
	return out
}

func (c Contents) encode() ([]byte, error) {
	if err := c.validate(); err != nil {
		return nil, err
	}
	out, err := json.MarshalIndent(c, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("encode contents: %w", err)
	}
	if len(out) > maxContentsBytes {
		return nil, fmt.Errorf("%w: its contents have %d bytes, the limit is %d", ErrTooLarge, len(out), maxContentsBytes)
	}
	return append(out, '\n'), nil
}

// decodeContents is strict, as snapshot.Decode is.
func decodeContents(data []byte) (Contents, error) {
	var version struct {
		FormatVersion int `json:"format_version"`
	}
	if err := json.Unmarshal(data, &version); err != nil {
		return Contents{}, fmt.Errorf("%w: contents: %w", ErrInvalid, err)
	}
	if version.FormatVersion > FormatVersion {
		return Contents{}, fmt.Errorf("%w: version %d, this forkd reads up to %d: use a newer forkd", ErrTooNew, version.FormatVersion, FormatVersion)
	}
	var c Contents
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&c); err != nil {
		return Contents{}, fmt.Errorf("%w: contents: %w", ErrInvalid, err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return Contents{}, fmt.Errorf("%w: contents: data behind their end", ErrInvalid)
	}
	again, err := c.encode() // validates
	if err != nil {
		return Contents{}, err
	}
	if !bytes.Equal(again, data) {
		return Contents{}, fmt.Errorf("%w: contents are not written the way forkd writes them", ErrInvalid)
	}
	return c, nil
}

func (c Contents) validate() error {
	if c.FormatVersion != FormatVersion {
		return fmt.Errorf("%w: format_version %d, want %d", ErrInvalid, c.FormatVersion, FormatVersion)
	}
	if err := c.Image.validate(); err != nil {
		return fmt.Errorf("%w: image: %w", ErrInvalid, err)
	}
	if err := c.validateChain(); err != nil {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return nil
}

func (i Image) validate() error {
	if !snapshot.ValidID(i.ID) {
		return fmt.Errorf("%.80q is not an id", i.ID)
	}
	if len(i.Name) > 0 && !snapshot.ValidID(i.Name) {
		return fmt.Errorf("%.80q is not a name", i.Name)
	}
	for _, p := range parts() {
		b := i.blob(p)
		if b.Bytes < 0 || b.Bytes > maxImagePart {
			return fmt.Errorf("%s has %d bytes", p, b.Bytes)
		}
		if sum, err := hex.DecodeString(b.SHA256); err != nil || len(sum) != 32 || hex.EncodeToString(sum) != b.SHA256 {
			return fmt.Errorf("%s: %.80q is not a SHA-256 in hex", p, b.SHA256)
		}
	}
	if len(i.Meta) > maxMetaBytes || !json.Valid(i.Meta) || !utf8.Valid(i.Meta) {
		return fmt.Errorf("its metadata is not JSON of at most %d bytes", maxMetaBytes)
	}
	return nil
}

// validateChain checks that the snapshots are one chain, root first, all of one image.
func (c Contents) validateChain() error {
	if n := len(c.Snapshots); n == 0 || n > maxSnapshots {
		return fmt.Errorf("it has %d snapshots, want 1 to %d", n, maxSnapshots)
	}
	seen := map[string]bool{}
	parent := ""
	for _, s := range c.Snapshots {
		m := s.Manifest
		switch err := m.Validate(); {
		case err != nil:
			return err
		case seen[m.ID]:
			return fmt.Errorf("the chain is a cycle: snapshot %s comes twice", m.ID)
		case m.Parent != parent:
			return fmt.Errorf("snapshot %s rests on %q, but comes behind %q", m.ID, m.Parent, parent)
		case m.Memory.PhysicalBytes != 0:
			return fmt.Errorf("snapshot %s says how much it takes on disk", m.ID)
		case m.Memory.LogicalBytes != c.Snapshots[0].Manifest.Memory.LogicalBytes:
			return fmt.Errorf("snapshot %s has memory of another size than its base", m.ID)
		case s.IndexBytes <= 0 || s.IndexBytes > snapshot.MaxIndexBytes:
			return fmt.Errorf("index of snapshot %s has %d bytes", m.ID, s.IndexBytes)
		}
		if err := c.Image.matches(m.Image); err != nil {
			return fmt.Errorf("snapshot %s: %w", m.ID, err)
		}
		seen[m.ID], parent = true, m.ID
	}
	if c.ID != parent {
		return fmt.Errorf("it is of snapshot %.80q, but its last is %s", c.ID, parent)
	}
	return nil
}

// matches checks that a snapshot was booted from this very image.
func (i Image) matches(ref snapshot.ImageRef) error {
	for _, pair := range [][2]string{
		{ref.ID, i.ID}, {ref.KernelSHA256, i.Kernel.SHA256}, {ref.InitramfsSHA256, i.Initramfs.SHA256}, {ref.RootfsSHA256, i.Rootfs.SHA256},
	} {
		if pair[0] != pair[1] {
			return fmt.Errorf("it was made from another image (expected %s, actual %s)", pair[0], pair[1])
		}
	}
	return nil
}
