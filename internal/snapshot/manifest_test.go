package snapshot

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/forkd/forkd/internal/memory"
)

// fullManifest has a value in every field.
func fullManifest() Manifest {
	m := testManifest()
	digest := strings.Repeat("0a", 32)
	m.FormatVersion, m.ID, m.Parent, m.BranchedFrom, m.Python = FormatVersion, "s1", "s0", "sb1", true
	m.CreatedAt = time.Date(2024, 5, 6, 7, 8, 9, 123456789, time.UTC)
	m.Image = ImageRef{ID: "i1", Name: "py <&> \u2028", KernelSHA256: digest, InitramfsSHA256: digest, RootfsSHA256: digest}
	m.Engine.Binary = "/usr/bin/qemu"
	m.Memory = MemoryInfo{LogicalBytes: testMiB << 20, DataBytes: 8192, PhysicalBytes: 8192, ChunkBytes: ChunkBytes, SHA256: digest}
	m.Device = Blob{Bytes: 8000, SHA256: digest}
	m.Recipe = Recipe{Image: "py", Probe: "true", Env: []string{"A=b"}, WarmUp: []WarmUp{{Kind: "eval", Code: "import numpy\nx = '<ü>'"}}}
	return m
}

func TestManifestRoundTrip(t *testing.T) {
	want := fullManifest()
	file, err := want.Encode()
	if err != nil {
		t.Fatal(err)
	}
	got, err := Decode(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	again, err := got.Encode()
	if err != nil || !bytes.Equal(again, file) {
		t.Errorf("encoding is not reproducible (%v)", err)
	}
}

// resign changes a manifest's file as somebody would who can also make its digest right, and writes it as Encode would.
func resign(t testing.TB, file []byte, change func(map[string]any)) []byte {
	t.Helper()
	var env envelope
	if err := json.Unmarshal(file, &env); err != nil {
		t.Fatal(err)
	}
	dec := json.NewDecoder(bytes.NewReader(env.Manifest))
	dec.UseNumber()
	var m map[string]any
	if err := dec.Decode(&m); err != nil {
		t.Fatal(err)
	}
	change(m)
	body, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	var typed Manifest // in the order of the fields, if it can still be read
	if err := unmarshalStrict(body, &typed); err == nil {
		if body, err = json.Marshal(typed); err != nil {
			t.Fatal(err)
		}
	}
	sum := sha256.Sum256(body)
	out, err := json.MarshalIndent(envelope{hex.EncodeToString(sum[:]), body}, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	return append(out, '\n')
}

func at(m map[string]any, path ...string) map[string]any {
	for _, key := range path {
		m = m[key].(map[string]any)
	}
	return m
}

func set(value any, path ...string) func(map[string]any) {
	return func(m map[string]any) { at(m, path[:len(path)-1]...)[path[len(path)-1]] = value }
}

func TestManifestTampering(t *testing.T) {
	file, err := fullManifest().Encode()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Decode(resign(t, file, func(map[string]any) {})); err != nil {
		t.Fatalf("unchanged: %v", err)
	}
	cases := map[string]struct {
		change func(map[string]any)
		want   string
	}{
		"newer format":          {set(2, "format_version"), "newer forkd"},
		"older format":          {set(0, "format_version"), "format_version"},
		"unknown field":         {set(1, "exec"), "unknown field"},
		"unknown field, nested": {set("/bin/sh", "engine", "exec"), "unknown field"},
		"id leads up":           {set("../s1", "id"), "id"},
		"id absolute":           {set("/etc", "id"), "id"},
		"id empty":              {set("", "id"), "id"},
		"id dot dot":            {set("..", "id"), "id"},
		"id with NUL":           {set("a\x00b", "id"), "id"},
		"id too long":           {set(strings.Repeat("a", 65), "id"), "id"},
		"parent leads up":       {set("../../etc", "parent"), "parent"},
		"parent hidden":         {set(".staging-x", "parent"), "parent"},
		"its own parent":        {set("s1", "parent"), "its own parent"},
		"image leads up":        {set("../../../dev", "image", "id"), "image.id"},
		"digest of image":       {set("../rootfs", "image", "rootfs_sha256"), "rootfs_sha256"},
		"no memory":             {set(0, "shape", "mem_mib"), "mem_mib"},
		"negative memory":       {set(-1, "shape", "mem_mib"), "mem_mib"},
		"too much memory":       {set(1<<40, "shape", "mem_mib"), "mem_mib"},
		"sizes disagree":        {set(1<<30, "memory", "logical_bytes"), "logical_bytes"},
		"data beyond memory":    {set(9<<20, "memory", "data_bytes"), "data_bytes"},
		"half a page":           {set(100, "memory", "data_bytes"), "data_bytes"},
		"file beyond data":      {set(8193, "memory", "physical_bytes"), "physical_bytes"},
		"negative file":         {set(-1, "memory", "physical_bytes"), "physical_bytes"},
		"chunk of a byte":       {set(1, "memory", "chunk_bytes"), "chunk_bytes"},
		"device of 4 GiB":       {set(4<<30, "device", "bytes"), "device.bytes"},
		"no digest":             {set("", "device", "sha256"), "sha256"},
		"digest in capitals":    {set(strings.Repeat("A", 64), "memory", "sha256"), "sha256"},
		"no processors":         {set(0, "shape", "vcpus"), "vcpus"},
		"unknown warm-up":       {set([]any{map[string]any{"kind": "curl", "code": ""}}, "recipe", "warm_up"), "warm_up.kind"},
		"text with NUL":         {set("a\x00", "engine", "cpu"), "engine.cpu"},
		"long text":             {set(strings.Repeat("x", 5000), "engine", "cpu"), "engine.cpu"},
		"type":                  {set("many", "shape", "vcpus"), "cannot unmarshal"},
		"fraction":              {set(1.5, "shape", "vcpus"), "cannot unmarshal"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			m, err := Decode(resign(t, file, c.change))
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %+v, error %v, want an error with %q", m, err, c.want)
			}
		})
	}
}

func TestManifestDecodeGarbage(t *testing.T) {
	file, err := fullManifest().Encode()
	if err != nil {
		t.Fatal(err)
	}
	for name, data := range map[string][]byte{
		"nothing":         nil,
		"null":            []byte("null"),
		"a list":          []byte("[]"),
		"empty object":    []byte("{}"),
		"two manifests":   append(bytes.Clone(file), file...),
		"spaces":          append(bytes.Clone(file), ' '),
		"too long":        make([]byte, maxManifestBytes+1),
		"deeply nested":   []byte(strings.Repeat("[", 100000)),
		"repeated fields": bytes.Replace(file, []byte(`"id": "s1",`), []byte(`"id": "s0", "id": "s1",`), 1),
	} {
		t.Run(name, func(t *testing.T) {
			if m, err := Decode(data); err == nil {
				t.Errorf("got %+v, want an error", m)
			}
		})
	}
}

// TestTamperedManifestInStore shows that a manifest whose digest was made right still can't make the store read elsewhere.
func TestTamperedManifestInStore(t *testing.T) {
	s := newStore(t)
	put(t, s, "one", "", newRAM(t, 1, memory.Extent{First: 0, N: 3}), nil)
	put(t, s, "two", "one", newRAM(t, 1, memory.Extent{First: 0, N: 3}), []memory.Extent{{First: 0, N: 1}})
	if err := os.Mkdir(filepath.Join(s.dir, "..", "outside"), 0o700); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		id     string
		change func(map[string]any)
	}{
		"another id":         {"one", set("two", "id")},
		"parent outside":     {"two", set("../outside", "parent")},
		"parent missing":     {"two", set("gone", "parent")},
		"cycle":              {"one", set("two", "parent")},
		"parent dropped":     {"two", func(m map[string]any) { delete(m, "parent") }},
		"data size":          {"one", set(4096, "memory", "data_bytes")},
		"digest of index":    {"one", set(strings.Repeat("0", 64), "memory", "sha256")},
		"digest of device":   {"one", set(strings.Repeat("0", 64), "device", "sha256")},
		"device size":        {"one", set(3, "device", "bytes")},
		"unequal memory":     {"one", func(m map[string]any) { at(m, "shape")["mem_mib"] = 4; at(m, "memory")["logical_bytes"] = 4 << 20 }},
		"format of tomorrow": {"one", set(99, "format_version")},
	} {
		t.Run(name, func(t *testing.T) {
			tamper := func(b []byte) []byte { return resign(t, b, c.change) }
			damage(t, filepath.Join(s.Dir(c.id), manifestFile), tamper, func(t *testing.T) {
				err := s.Verify(t.Context(), "two")
				if c.id == "one" {
					err = errors.Join(err, s.Verify(t.Context(), "one"))
				}
				if !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrTooNew) {
					t.Errorf("Verify: got %v, want %v", err, ErrCorrupt)
				}
				if img, err := s.Load(t.Context(), "two"); err == nil && c.id == "two" {
					img.Close()
					t.Error("Load: got no error")
				}
				t.Log(err)
			})
		})
	}
}

func FuzzDecode(f *testing.F) {
	file, err := fullManifest().Encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(file)
	f.Add(resign(f, file, set("../x", "id")))
	f.Add([]byte(`{"sha256":"","manifest":{}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := Decode(data)
		if err != nil {
			return
		}
		again, err := m.Encode()
		if err != nil || !bytes.Equal(again, data) {
			t.Errorf("accepted a manifest that is not written that way: %v", err)
		}
		if !ValidID(m.ID) || m.Parent != "" && !ValidID(m.Parent) {
			t.Errorf("accepted ids %q, %q", m.ID, m.Parent)
		}
	})
}

// FuzzDecodeManifestBody gets past the digest, so that the fields are reached.
func FuzzDecodeManifestBody(f *testing.F) {
	m := fullManifest()
	body, err := json.Marshal(m)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(body)
	f.Fuzz(func(t *testing.T, body []byte) {
		if !json.Valid(body) {
			return
		}
		sum := sha256.Sum256(body)
		file, err := json.MarshalIndent(envelope{hex.EncodeToString(sum[:]), body}, "", "  ")
		if err != nil {
			return
		}
		if m, err := Decode(append(file, '\n')); err == nil && (!ValidID(m.ID) || m.Memory.LogicalBytes <= 0) {
			t.Errorf("accepted %+v", m)
		}
	})
}

func FuzzDecodeIndex(f *testing.F) {
	x := &index{logical: testMiB << 20, layer: true, data: []memory.Extent{{First: 0, N: 300}, {First: 400, N: 1}}, zero: []memory.Extent{{First: 302, N: 7}},
		sums: make([][digestBytes]byte, 2), stored: []uint32{ChunkBytes, 4096}}
	f.Add(x.encode()[:len(x.encode())-digestBytes])
	f.Fuzz(func(t *testing.T, body []byte) {
		sum := sha256.Sum256(body)
		x, err := decodeIndex(append(bytes.Clone(body), sum[:]...))
		if err != nil {
			return
		}
		var pages uint64
		for _, c := range x.chunks() { // must not panic, and covers all data once
			pages += memory.Pages(c.extents)
		}
		if pages != memory.Pages(x.data) {
			t.Errorf("chunks cover %d pages of %d", pages, memory.Pages(x.data))
		}
		if !bytes.Equal(x.encode()[:len(body)], body) {
			t.Error("encoding differs")
		}
	})
}
