package snapshot

import (
	"fmt"
	"regexp"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/forkd/forkd/internal/memory"
)

// Limits of what a manifest may say. They are far above what forkd makes, and bound what a hostile one can cost.
const (
	maxManifestBytes = 4 << 20
	maxDeviceBytes   = 256 << 20
	maxIndexBytes    = 256 << 20 // millions of extents
	maxMemMiB        = 4 << 20   // 4 TiB
	maxVCPUs         = 4096
	maxWarmUps       = 1024
	maxCodeBytes     = 1 << 20
	maxEnv           = 4096
	maxTextBytes     = 4096
	maxChain         = 1024 // layers over a base
)

// ChunkBytes is how many bytes of stored pages share a digest.
const ChunkBytes = 1 << 20

var (
	idPattern     = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)
	digestPattern = regexp.MustCompile(`^[0-9a-f]{64}$`)
)

// ValidID reports whether id can name a snapshot: it is a path element that leads nowhere else.
func ValidID(id string) bool { return idPattern.MatchString(id) }

type checker struct{ err error }

func (c *checker) require(ok bool, format string, args ...any) {
	if !ok && c.err == nil {
		c.err = fmt.Errorf("%w: "+format, append([]any{ErrInvalid}, args...)...)
	}
}

func (c *checker) text(field, s string, limit int) {
	c.require(len(s) <= limit, "%s has %d bytes, the limit is %d", field, len(s), limit)
	c.require(utf8.ValidString(s) && !strings.ContainsRune(s, 0), "%s is not plain text", field)
}

func (c *checker) id(field, s string, optional bool) {
	c.require(optional && s == "" || idPattern.MatchString(s), "%s %.80q is not an id: want %s", field, s, idPattern)
}

func (c *checker) digest(field, s string, optional bool) {
	c.require(optional && s == "" || digestPattern.MatchString(s), "%s %.80q is not a SHA-256 in hex", field, s)
}

func (m Manifest) validate() error {
	c := &checker{}
	c.require(m.FormatVersion == FormatVersion, "format_version %d, want %d", m.FormatVersion, FormatVersion)
	c.id("id", m.ID, false)
	c.id("parent", m.Parent, true)
	c.require(m.Parent != m.ID, "snapshot %s is its own parent", m.ID)
	c.require(m.CreatedAt.Location() == time.UTC && m.CreatedAt.Year() >= 1 && m.CreatedAt.Year() < 10000, "created_at is not a UTC time")
	c.id("image.id", m.Image.ID, true)
	c.text("image.name", m.Image.Name, maxTextBytes)
	c.digest("image.kernel_sha256", m.Image.KernelSHA256, true)
	c.digest("image.initramfs_sha256", m.Image.InitramfsSHA256, true)
	c.digest("image.rootfs_sha256", m.Image.RootfsSHA256, true)
	for _, f := range []struct{ field, text string }{
		{"engine", m.Engine.Engine}, {"version", m.Engine.Version}, {"accel", m.Engine.Accel},
		{"machine", m.Engine.Machine}, {"cpu", m.Engine.CPU}, {"binary", m.Engine.Binary},
	} {
		c.text("engine."+f.field, f.text, maxTextBytes)
	}
	c.require(m.Shape.MemMiB >= 1 && m.Shape.MemMiB <= maxMemMiB, "shape.mem_mib %d is not in 1..%d", m.Shape.MemMiB, maxMemMiB)
	c.require(m.Shape.VCPUs >= 1 && m.Shape.VCPUs <= maxVCPUs, "shape.vcpus %d is not in 1..%d", m.Shape.VCPUs, maxVCPUs)
	c.require(m.Device.Bytes >= 0 && m.Device.Bytes <= maxDeviceBytes, "device.bytes %d is not in 0..%d", m.Device.Bytes, maxDeviceBytes)
	c.digest("device.sha256", m.Device.SHA256, false)
	c.text("branched_from", m.BranchedFrom, maxTextBytes)
	m.validateMemory(c)
	m.Recipe.validate(c)
	return c.err
}

func (m Manifest) validateMemory(c *checker) {
	info := m.Memory
	c.require(info.LogicalBytes == int64(m.Shape.MemMiB)<<20, "memory.logical_bytes %d does not fit mem_mib %d", info.LogicalBytes, m.Shape.MemMiB)
	c.require(info.DataBytes >= 0 && info.DataBytes <= info.LogicalBytes && info.DataBytes%memory.PageSize == 0,
		"memory.data_bytes %d is not a number of pages within %d", info.DataBytes, info.LogicalBytes)
	c.require(info.PhysicalBytes >= 0 && info.PhysicalBytes <= info.DataBytes,
		"memory.physical_bytes %d is not in 0..%d", info.PhysicalBytes, info.DataBytes)
	c.require(info.ChunkBytes == ChunkBytes, "memory.chunk_bytes %d, want %d", info.ChunkBytes, ChunkBytes)
	c.digest("memory.sha256", info.SHA256, false)
}

func (r Recipe) validate(c *checker) {
	c.text("recipe.image", r.Image, maxTextBytes)
	c.text("recipe.probe", r.Probe, maxCodeBytes)
	c.require(len(r.WarmUp) <= maxWarmUps, "recipe has %d warm-up steps, the limit is %d", len(r.WarmUp), maxWarmUps)
	for _, w := range r.WarmUp {
		c.require(w.Kind == "exec" || w.Kind == "eval", "recipe.warm_up.kind %.80q is neither exec nor eval", w.Kind)
		c.text("recipe.warm_up.code", w.Code, maxCodeBytes)
	}
	l := r.Limits
	c.require(l.MemoryMiB >= 0 && l.CPUs >= 0 && l.PIDs >= 0 && l.IOMiBPerS >= 0, "recipe.limits: %+v has a negative one", l)
	c.require(len(r.Env) <= maxEnv, "recipe has %d environment variables, the limit is %d", len(r.Env), maxEnv)
	for _, kv := range r.Env {
		c.text("recipe.env", kv, maxCodeBytes)
	}
}
