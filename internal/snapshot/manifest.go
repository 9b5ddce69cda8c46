package snapshot

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/forkd/forkd/internal/limits"
	"github.com/forkd/forkd/internal/vmm"
)

// FormatVersion is the format this package writes. It reads no other yet.
const FormatVersion = 1

// Manifest describes a snapshot: what it rests on, what it holds, and everything that a restore depends on.
type Manifest struct {
	FormatVersion int        `json:"format_version"`
	ID            string     `json:"id"`
	CreatedAt     time.Time  `json:"created_at"`
	Parent        string     `json:"parent,omitempty"` // the snapshot whose memory this one's layer lies over; empty: self-contained
	Image         ImageRef   `json:"image"`
	Engine        vmm.Info   `json:"engine"`
	Shape         vmm.Shape  `json:"shape"`
	Memory        MemoryInfo `json:"memory"` // filled by Publish
	Device        Blob       `json:"device"` // filled by Publish
	Recipe        Recipe     `json:"recipe"`
	Python        bool       `json:"python"`                  // has an interpreter to eval in
	BranchedFrom  string     `json:"branched_from,omitempty"` // the sandbox it was branched from
}

// ImageRef names the image that a snapshot was booted from. The root file system is needed to restore it.
type ImageRef struct {
	ID              string `json:"id"`
	Name            string `json:"name"`
	KernelSHA256    string `json:"kernel_sha256"`
	InitramfsSHA256 string `json:"initramfs_sha256"`
	RootfsSHA256    string `json:"rootfs_sha256"`
}

// MemoryInfo describes the memory files of a snapshot.
type MemoryInfo struct {
	LogicalBytes  int64  `json:"logical_bytes"`  // of guest memory
	DataBytes     int64  `json:"data_bytes"`     // of the pages stored
	PhysicalBytes int64  `json:"physical_bytes"` // of file memory: less than DataBytes when it is compressed
	ChunkBytes    int    `json:"chunk_bytes"`    // of stored pages that share a digest
	SHA256        string `json:"sha256"`         // of the index: which pages there are, and the digest of each chunk
}

// Blob is a file and its digest.
type Blob struct {
	Bytes  int64  `json:"bytes"`
	SHA256 string `json:"sha256"`
}

// Recipe is how the snapshot came about, for people and for building it anew.
type Recipe struct {
	Image  string        `json:"image,omitempty"`
	WarmUp []WarmUp      `json:"warm_up,omitempty"`
	Probe  string        `json:"probe,omitempty"`
	Env    []string      `json:"env,omitempty"`   // K=V
	Limits limits.Limits `json:"limits,omitzero"` // of children that are asked for without
}

// WarmUp is a step of a recipe.
type WarmUp struct {
	Kind string `json:"kind"` // "exec" or "eval"
	Code string `json:"code"`
}

// envelope is the manifest's file: the digest covers the manifest's bytes as they stand there.
type envelope struct {
	SHA256   string          `json:"sha256"`
	Manifest json.RawMessage `json:"manifest"`
}

// Encode returns the manifest as its file has it: JSON with its own digest. The same manifest gives the same bytes.
func (m Manifest) Encode() ([]byte, error) {
	if err := m.validate(); err != nil {
		return nil, err
	}
	body, err := json.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encode manifest of snapshot %s: %w", m.ID, err)
	}
	sum := sha256.Sum256(body)
	compact, err := json.Marshal(envelope{hex.EncodeToString(sum[:]), body})
	if err != nil {
		return nil, fmt.Errorf("encode manifest of snapshot %s: %w", m.ID, err)
	}
	var out bytes.Buffer
	if err := json.Indent(&out, compact, "", "  "); err != nil {
		return nil, fmt.Errorf("encode manifest of snapshot %s: %w", m.ID, err)
	}
	out.WriteByte('\n')
	return out.Bytes(), nil
}

// Decode reads a manifest's file. It is strict: unknown fields, values out of bounds, a digest that does not match and bytes that
// Encode would not have written are errors.
func Decode(file []byte) (Manifest, error) {
	if len(file) > maxManifestBytes {
		return Manifest{}, fmt.Errorf("manifest has %d bytes, more than the limit of %d", len(file), maxManifestBytes)
	}
	var env envelope
	if err := unmarshalStrict(file, &env); err != nil {
		return Manifest{}, err
	}
	var body bytes.Buffer
	if err := json.Compact(&body, env.Manifest); err != nil {
		return Manifest{}, err
	}
	if sum := sha256.Sum256(body.Bytes()); hex.EncodeToString(sum[:]) != env.SHA256 {
		return Manifest{}, fmt.Errorf("digest of the manifest does not match: it says %.64s, its content gives %x", env.SHA256, sum)
	}
	var version struct {
		FormatVersion int `json:"format_version"`
	}
	if err := json.Unmarshal(body.Bytes(), &version); err != nil {
		return Manifest{}, err
	}
	if version.FormatVersion > FormatVersion {
		return Manifest{}, fmt.Errorf("%w: version %d, this forkd reads up to %d: use a newer forkd", ErrTooNew, version.FormatVersion, FormatVersion)
	}
	var m Manifest
	if err := unmarshalStrict(body.Bytes(), &m); err != nil {
		return Manifest{}, err
	}
	again, err := m.Encode() // validates
	if err != nil {
		return Manifest{}, err
	}
	if !bytes.Equal(again, file) {
		return Manifest{}, errors.New("manifest is not written the way forkd writes it")
	}
	return m, nil
}

// unmarshalStrict decodes exactly one JSON value and refuses fields it does not know.
func unmarshalStrict(data []byte, v any) error {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		return fmt.Errorf("not a manifest: %w", err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return errors.New("not a manifest: data behind its end")
	}
	return nil
}
