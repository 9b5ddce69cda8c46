package pack

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/snapshot"
)

// entry is a member of an archive that a test takes apart.
type entry struct {
	header tar.Header
	body   []byte
}

func takeApart(t testing.TB, file []byte) []entry {
	t.Helper()
	dec, err := zstd.NewReader(bytes.NewReader(file))
	if err != nil {
		t.Fatal(err)
	}
	defer dec.Close()
	r := tar.NewReader(dec)
	var out []entry
	for {
		h, err := r.Next()
		if err == io.EOF {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, entry{*h, body})
	}
}

// rawTar lets headers lie about sizes: each member is its header, then its body, padded.
func rawTar(t testing.TB, entries []entry) []byte {
	t.Helper()
	var out bytes.Buffer
	for _, e := range entries {
		var head bytes.Buffer
		w := tar.NewWriter(&head)
		if err := w.WriteHeader(&e.header); err != nil {
			t.Fatalf("%s: %v", e.header.Name, err)
		}
		out.Write(head.Bytes())
		out.Write(e.body)
		out.Write(make([]byte, (512-len(e.body)%512)%512))
	}
	out.Write(make([]byte, 1024))
	return out.Bytes()
}

func compress(t testing.TB, data []byte) []byte {
	t.Helper()
	enc, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer enc.Close()
	return enc.EncodeAll(data, nil)
}

func putTogether(t testing.TB, entries []entry) []byte { return compress(t, rawTar(t, entries)) }

// withContents changes what a pack says of itself.
func withContents(t testing.TB, file []byte, change func(*Contents)) []byte {
	t.Helper()
	return withRawContents(t, file, func(data []byte) []byte {
		var c Contents
		if err := json.Unmarshal(data, &c); err != nil {
			t.Fatal(err)
		}
		change(&c)
		out, err := json.MarshalIndent(c, "", "  ")
		if err != nil {
			t.Fatal(err)
		}
		return append(out, '\n')
	})
}

func withRawContents(t testing.TB, file []byte, change func([]byte) []byte) []byte {
	t.Helper()
	entries := takeApart(t, file)
	entries[0].body = change(entries[0].body)
	entries[0].header.Size = int64(len(entries[0].body))
	return putTogether(t, entries)
}

func resigned(t testing.TB, file []byte, change func(*signature)) []byte {
	t.Helper()
	entries := takeApart(t, file)
	var sig signature
	if err := json.Unmarshal(entries[1].body, &sig); err != nil {
		t.Fatal(err)
	}
	change(&sig)
	body, err := json.Marshal(sig)
	if err != nil {
		t.Fatal(err)
	}
	entries[1].body, entries[1].header.Size = append(body, '\n'), int64(len(body)+1)
	return putTogether(t, entries)
}

func find(t testing.TB, entries []entry, name string) int {
	t.Helper()
	i := slices.IndexFunc(entries, func(e entry) bool { return e.header.Name == name })
	if i < 0 {
		t.Fatalf("no member %s", name)
	}
	return i
}

// edited changes the members of a pack.
func edited(t testing.TB, file []byte, change func([]entry) []entry) []byte {
	t.Helper()
	return putTogether(t, change(takeApart(t, file)))
}

func replaced(t testing.TB, file []byte, name string, change func(*entry)) []byte {
	t.Helper()
	return edited(t, file, func(entries []entry) []entry {
		change(&entries[find(t, entries, name)])
		return entries
	})
}

func digestOf(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

// refused unpacks a hostile file and checks that it leaves no trace, inside the stores or beside them.
func refused(t *testing.T, file []byte, want error, say string) {
	t.Helper()
	parent := t.TempDir()
	t.Chdir(parent)
	for _, dir := range []string{"snapshots", "images"} {
		if err := os.Mkdir(filepath.Join(parent, dir), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	store, err := snapshot.Open(filepath.Join(parent, "snapshots"))
	if err != nil {
		t.Fatal(err)
	}
	to := host{store, &fakeImages{filepath.Join(parent, "images")}}
	if _, err := to.unpack(t, file, UnpackOptions{}); !errors.Is(err, want) || !strings.Contains(err.Error(), say) {
		t.Errorf("got error %v, want %v that says %q", err, want, say)
	} else {
		t.Log(err)
	}
	if got := to.names(t); len(got) != 0 {
		t.Errorf("left in the stores: %v", got)
	}
	beside, err := os.ReadDir(parent)
	if err != nil || len(beside) != 2 {
		t.Errorf("left beside the stores: %v (%v)", beside, err)
	}
}

func TestHostileMembers(t *testing.T) {
	good := newSource(t).pack(t, "tip", Options{})
	rename := func(to string) []byte {
		return replaced(t, good, "image/rootfs", func(e *entry) { e.header.Name = to })
	}
	typed := func(typeflag byte, change func(*tar.Header)) []byte {
		return replaced(t, good, "snapshots/mid/memory", func(e *entry) {
			e.header = tar.Header{Name: e.header.Name, Typeflag: typeflag, ModTime: time.Unix(0, 0), Mode: 0o644}
			e.body = nil
			change(&e.header)
		})
	}
	header := func(change func(*tar.Header)) []byte {
		return replaced(t, good, "image/kernel", func(e *entry) { change(&e.header) })
	}
	tail := func(extra ...entry) []byte {
		return edited(t, good, func(e []entry) []entry { return append(e, extra...) })
	}
	plain := func(name string, body string) entry {
		return entry{tar.Header{Typeflag: tar.TypeReg, Name: name, Size: int64(len(body)), Mode: 0o644, ModTime: time.Unix(0, 0)}, []byte(body)}
	}
	for name, c := range map[string]struct {
		file []byte
		say  string
	}{
		"absolute path":            {rename("/etc/cron.d/forkd"), "absolute path"},
		"path that leads up":       {rename("../../../etc/passwd"), "leads outside"},
		"path that leads up later": {rename("image/../../rootfs"), "leads outside"},
		"name of another snapshot": {rename("snapshots/other/memory"), "comes where image/rootfs should be"},
		"dotted name":              {rename("./image/rootfs"), "comes where image/rootfs should be"},
		"symbolic link":            {typed(tar.TypeSymlink, func(h *tar.Header) { h.Linkname = "/etc/passwd" }), "symbolic link"},
		"hard link":                {typed(tar.TypeLink, func(h *tar.Header) { h.Linkname = "image/kernel" }), "hard link"},
		"character device":         {typed(tar.TypeChar, func(h *tar.Header) { h.Devmajor, h.Devminor = 1, 3 }), "device"},
		"block device":             {typed(tar.TypeBlock, func(h *tar.Header) { h.Devmajor = 8 }), "device"},
		"pipe":                     {typed(tar.TypeFifo, func(*tar.Header) {}), "pipe"},
		"directory":                {typed(tar.TypeDir, func(h *tar.Header) { h.Name += "/" }), "directory"},
		"setuid":                   {header(func(h *tar.Header) { h.Mode = 0o4755 }), "not written the way"},
		"owner":                    {header(func(h *tar.Header) { h.Uid = 1000 }), "not written the way"},
		"time":                     {header(func(h *tar.Header) { h.ModTime = time.Unix(1e9, 0) }), "not written the way"},
		"extended attributes": {header(func(h *tar.Header) {
			h.PAXRecords = map[string]string{"SCHILY.xattr.user.x": "y"}
			h.Format = tar.FormatPAX
		}), "not written the way"},
		"duplicate":            {edited(t, good, func(e []entry) []entry { return slices.Insert(e, 2, e[1]) }), "comes twice"},
		"second contents":      {tail(takeApart(t, good)[0]), "comes twice"},
		"missing part":         {edited(t, good, func(e []entry) []entry { i := find(t, e, "image/initramfs"); return slices.Delete(e, i, i+1) }), "comes where image/initramfs should be"},
		"missing end":          {edited(t, good, func(e []entry) []entry { return e[:len(e)-1] }), "snapshots/tip/device-state is missing"},
		"contents only":        {edited(t, good, func(e []entry) []entry { return e[:1] }), "image/kernel is missing"},
		"contents not first":   {edited(t, good, func(e []entry) []entry { return append(e[1:], e[0]) }), "comes where forkd-pack.json should be"},
		"extra member":         {tail(plain("extra", "x")), "comes where the end should be"},
		"extra member outside": {tail(plain("../evil", "x")), "leads outside"},
		"size too small": {replaced(t, good, "snapshots/root/memory", func(e *entry) { e.header.Size -= 4096; e.body = e.body[:len(e.body)-4096] }),
			"the contents say"},
		"size too large": {replaced(t, good, "snapshots/root/memory", func(e *entry) { e.header.Size += 4096 }), "the contents say"},
		"nothing":        {nil, "is missing"},
		"empty archive":  {putTogether(t, nil), "forkd-pack.json is missing"},
		"no archive":     {compress(t, bytes.Repeat([]byte("junk"), 1000)), "before member forkd-pack.json"},
		"not compressed": {rawTar(t, takeApart(t, good)), "before member forkd-pack.json"},
		"data behind":    {compress(t, append(rawTar(t, takeApart(t, good)), "more"...)), "data behind its end"},
		"frame behind":   {append(bytes.Clone(good), compress(t, []byte("more"))...), "data behind its end"},
		"junk behind":    {append(bytes.Clone(good), "junk"...), "at its end"},
	} {
		t.Run(name, func(t *testing.T) { refused(t, c.file, ErrInvalid, c.say) })
	}
}

func TestHostileContents(t *testing.T) {
	good := newSource(t).pack(t, "tip", Options{})
	changed := func(change func(*Contents)) []byte { return withContents(t, good, change) }
	manifest := func(i int, change func(*snapshot.Manifest)) []byte {
		return changed(func(c *Contents) { change(&c.Snapshots[i].Manifest) })
	}
	raw := func(old, with string) []byte {
		return withRawContents(t, good, func(b []byte) []byte {
			if !bytes.Contains(b, []byte(old)) {
				t.Fatalf("contents have no %q", old)
			}
			return bytes.Replace(b, []byte(old), []byte(with), 1)
		})
	}
	zeros := strings.Repeat("0", 64)
	for name, c := range map[string]struct {
		file []byte
		want error
		say  string
	}{
		"id outside":         {manifest(2, func(m *snapshot.Manifest) { m.ID = "../tip" }), ErrInvalid, "is not an id"},
		"id absolute":        {manifest(0, func(m *snapshot.Manifest) { m.ID = "/tip" }), ErrInvalid, "is not an id"},
		"parent outside":     {manifest(1, func(m *snapshot.Manifest) { m.Parent = "../../x" }), ErrInvalid, "is not an id"},
		"image id outside":   {changed(func(c *Contents) { c.Image.ID = "../img1" }), ErrInvalid, "is not an id"},
		"image name outside": {changed(func(c *Contents) { c.Image.Name = "../py" }), ErrInvalid, "is not a name"},
		"cycle":              {changed(func(c *Contents) { c.Snapshots[0].Manifest.Parent = "tip" }), ErrInvalid, "comes behind"},
		"cycle, repeated": {changed(func(c *Contents) {
			s := c.Snapshots[0]
			s.Manifest.Parent = "tip"
			c.Snapshots = append(c.Snapshots, s)
		}), ErrInvalid, "cycle"},
		"gap in the chain": {changed(func(c *Contents) { c.Snapshots = slices.Delete(c.Snapshots, 1, 2) }), ErrInvalid, "rests on"},
		"root missing":     {changed(func(c *Contents) { c.Snapshots = c.Snapshots[1:] }), ErrInvalid, "rests on"},
		"no snapshots":     {changed(func(c *Contents) { c.Snapshots = nil }), ErrInvalid, "0 snapshots"},
		"another tip":      {changed(func(c *Contents) { c.ID = "mid" }), ErrInvalid, "its last is tip"},
		"another image":    {manifest(1, func(m *snapshot.Manifest) { m.Image.ID = "img2" }), ErrInvalid, "another image"},
		"another kernel":   {changed(func(c *Contents) { c.Image.Kernel.SHA256 = zeros }), ErrInvalid, "another image"},
		"digest of kernel": {changed(func(c *Contents) {
			c.Image.Kernel.SHA256 = zeros
			everyImage(c, func(r *snapshot.ImageRef) { r.KernelSHA256 = zeros })
		}), snapshot.ErrCorrupt, "image/kernel"},
		"digest not hex":       {changed(func(c *Contents) { c.Image.Rootfs.SHA256 = "../x" }), ErrInvalid, "SHA-256"},
		"size of kernel":       {changed(func(c *Contents) { c.Image.Kernel.Bytes-- }), ErrInvalid, "the contents say"},
		"negative size":        {changed(func(c *Contents) { c.Image.Kernel.Bytes = -1 }), ErrInvalid, "-1 bytes"},
		"digest of memory":     {manifest(0, func(m *snapshot.Manifest) { m.Memory.SHA256 = zeros }), snapshot.ErrCorrupt, "memory.index"},
		"digest of device":     {manifest(0, func(m *snapshot.Manifest) { m.Device.SHA256 = zeros }), snapshot.ErrCorrupt, "device-state"},
		"size of memory":       {manifest(0, func(m *snapshot.Manifest) { m.Memory.DataBytes += 4096 }), ErrInvalid, "the contents say"},
		"size of device":       {manifest(0, func(m *snapshot.Manifest) { m.Device.Bytes = 1 << 40 }), ErrInvalid, "device.bytes"},
		"unequal memories":     {manifest(1, func(m *snapshot.Manifest) { m.Shape.MemMiB = 8; m.Memory.LogicalBytes = 8 << 20 }), ErrInvalid, "another size"},
		"physical size":        {manifest(1, func(m *snapshot.Manifest) { m.Memory.PhysicalBytes = 4096 }), ErrInvalid, "takes on disk"},
		"index size":           {changed(func(c *Contents) { c.Snapshots[0].IndexBytes = 1 << 40 }), ErrInvalid, "index of snapshot root"},
		"layer without parent": {changed(func(c *Contents) { c.Snapshots = c.Snapshots[1:]; c.Snapshots[0].Manifest.Parent = "" }), ErrInvalid, "should be"},
		"unknown field":        {raw(`"id":`, `"exec": "x", "id":`), ErrInvalid, "unknown field"},
		"not as written":       {raw(`"id":`, `"id" :`), ErrInvalid, "the way forkd writes"},
		"newer format":         {changed(func(c *Contents) { c.FormatVersion = 2 }), ErrTooNew, "newer forkd"},
		"newer manifest":       {manifest(0, func(m *snapshot.Manifest) { m.FormatVersion = 2 }), ErrInvalid, "format_version"},
		"not JSON":             {withRawContents(t, good, func([]byte) []byte { return []byte("\x00\x01") }), ErrInvalid, "contents"},
		"more room than is":    {changed(hugeButConsistent), snapshot.ErrDiskFull, "MiB are needed"},
	} {
		t.Run(name, func(t *testing.T) { refused(t, c.file, c.want, c.say) })
	}
}

func everyImage(c *Contents, change func(*snapshot.ImageRef)) {
	for i := range c.Snapshots {
		change(&c.Snapshots[i].Manifest.Image)
	}
}

// hugeButConsistent promises more than any disk has, within the limits of each field.
func hugeButConsistent(c *Contents) {
	c.Image.Rootfs.Bytes = maxImagePart
	for i := range c.Snapshots {
		m := &c.Snapshots[i].Manifest
		m.Shape.MemMiB, m.Memory.LogicalBytes, m.Memory.DataBytes = 4<<20, 4<<40, 4<<40
	}
}

// TestHostileBytes flips one bit in every part of the members.
func TestHostileBytes(t *testing.T) {
	good := newSource(t).pack(t, "tip", Options{})
	for _, e := range takeApart(t, good)[1:] {
		t.Run(e.header.Name, func(t *testing.T) {
			for _, at := range []int{0, len(e.body) / 2, len(e.body) - 1} {
				file := replaced(t, good, e.header.Name, func(e *entry) { e.body[at] ^= 0x10 })
				t.Run("", func(t *testing.T) { refused(t, file, snapshot.ErrCorrupt, "") })
			}
		})
	}
}

// TestBomb has a few KiB that unfold to 8 GiB, behind contents that promise a few MiB, and behind contents that promise nothing yet.
func TestBomb(t *testing.T) {
	good := newSource(t).pack(t, "tip", Options{})
	bomb := frameOfZeros(8 << 30)
	if len(bomb) > 1<<20 {
		t.Fatalf("the bomb has %d bytes", len(bomb))
	}
	entries := takeApart(t, good)
	before := func(name string) []byte {
		all := rawTar(t, entries[:find(t, entries, name)])
		return all[:len(all)-1024] // without the end
	}
	lyingHeader := func(name string, size int64) []byte {
		e := entries[find(t, entries, name)]
		e.header.Size, e.body = size, nil
		all := rawTar(t, []entry{e})
		return all[:512]
	}
	for name, c := range map[string]struct {
		file []byte
		say  string
	}{
		"in a member that promises less": {slices.Concat(compress(t, slices.Concat(before("image/rootfs"), lyingHeader("image/rootfs", 7<<30))), bomb), "the contents say"},
		"in a member of the right size":  {slices.Concat(compress(t, slices.Concat(before("image/rootfs"), lyingHeader("image/rootfs", entries[3].header.Size))), bomb), "image/rootfs"},
		"behind the end":                 {slices.Concat(good, bomb), "behind its end"},
		"as contents":                    {slices.Concat(compress(t, lyingHeader(contentsName, 4<<30)), bomb), "the limit is"},
		"as everything":                  {bomb, "is missing"},
	} {
		t.Run(name, func(t *testing.T) {
			want := ErrInvalid
			if c.say == "image/rootfs" {
				want = snapshot.ErrCorrupt
			}
			start := time.Now()
			refused(t, c.file, want, c.say)
			if took := time.Since(start); took > 5*time.Second {
				t.Errorf("took %v: it was unfolded", took)
			}
		})
	}
}

// frameOfZeros is a zstd frame whose blocks are one byte repeated: 4 bytes for 128 KiB.
func frameOfZeros(n int64) []byte {
	out := []byte{0x28, 0xb5, 0x2f, 0xfd, 0x00, 0x38} // magic, no checksum, a window of 128 KiB
	const block = 128 << 10
	for ; n > 0; n -= block {
		last := uint32(0)
		if n <= block {
			last = 1
		}
		head := binary.LittleEndian.AppendUint32(nil, last|1<<1|block<<3) // 1: RLE
		out = append(out, head[0], head[1], head[2], 0)
	}
	return out
}

// TestHugeWindow wants the reader to keep far more than forkd ever refers back to.
func TestHugeWindow(t *testing.T) {
	refused(t, []byte{0x28, 0xb5, 0x2f, 0xfd, 0x00, 0xf8, 1, 0, 0}, ErrInvalid, "window")
}

// TestTruncated cuts a pack at every 64 KiB, and at odd places near both ends.
func TestTruncated(t *testing.T) {
	good := newSource(t).pack(t, "tip", Options{})
	cuts := []int{0, 1, 3, 17, 100, 1000, len(good) - 1, len(good) - 4, len(good) - 5, len(good) - 100}
	for at := 64 << 10; at < len(good); at += 64 << 10 {
		cuts = append(cuts, at)
	}
	for _, at := range cuts {
		t.Run("", func(t *testing.T) { refused(t, good[:at], ErrInvalid, "") })
	}
	if len(cuts) < 30 {
		t.Errorf("only %d cuts of %d bytes", len(cuts), len(good))
	}
}

// FuzzContents is for the first member alone: nothing that is accepted may name a path, or promise what can't be.
func FuzzContents(f *testing.F) {
	f.Add(takeApart(f, newSource(f).pack(f, "tip", Options{}))[0].body)
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := decodeContents(data)
		if err != nil {
			return
		}
		for _, m := range c.members() {
			if !filepath.IsLocal(m.name) || m.bytes < 0 {
				t.Errorf("accepted member %q of %d bytes", m.name, m.bytes)
			}
		}
		if again, err := c.encode(); err != nil || !bytes.Equal(again, data) {
			t.Errorf("accepted contents that are not written that way (%v)", err)
		}
	})
}

// FuzzUnpack feeds the parser archives before compression, so that the fuzzer reaches it.
func FuzzUnpack(f *testing.F) {
	from := newHost(f)
	from.images.add(f, "img1")
	for _, part := range parts() { // small, so that the fuzzer is fast
		if err := os.WriteFile(filepath.Join(from.images.dir, "img1", string(part)), nil, 0o600); err != nil {
			f.Fatal(err)
		}
	}
	small := Image{ID: "img1", Meta: json.RawMessage("{}")}
	small.Kernel.SHA256, small.Initramfs.SHA256, small.Rootfs.SHA256 = digestOf(nil), digestOf(nil), digestOf(nil)
	meta, err := json.Marshal(small)
	if err != nil {
		f.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(from.images.dir, "img1", "meta.json"), meta, 0o600); err != nil {
		f.Fatal(err)
	}
	from.put(f, "root", "", 1, []memory.Extent{{First: 0, N: 2}, {First: 3, N: 1}})
	from.put(f, "tip", "root", 2, []memory.Extent{{First: 1, N: 1}, {First: 4, N: 1}})
	good := from.pack(f, "tip", Options{})
	f.Add(rawTar(f, takeApart(f, good)))
	f.Add(rawTar(f, nil))
	to := newHost(f)
	f.Fuzz(func(t *testing.T, archive []byte) {
		u := &unpacker{ctx: t.Context(), store: to.store, images: to.images, report: newReporter(nil)}
		err := u.unpack(bytes.NewReader(archive))
		u.abort()
		if err == nil {
			if err := to.store.Verify(t.Context(), u.result.Manifest.ID); err != nil {
				t.Errorf("accepted, but: %v", err)
			}
			for _, id := range slices.Backward(u.result.Published) {
				if err := to.store.Remove(id); err != nil {
					t.Fatal(err)
				}
			}
			if err := to.images.Remove(t.Context(), u.result.Image); err != nil {
				t.Fatal(err)
			}
		}
		if n := to.names(t); len(n) != 0 {
			t.Errorf("left over after error %v: %v", err, n)
		}
	})
}
