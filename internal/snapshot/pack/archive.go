package pack

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"
)

// archive reads the members of a pack, each only where and how it must be.
type archive struct {
	in   io.Reader // what tar reads
	tar  *tar.Reader
	seen map[string]bool
	head *tar.Header // read ahead by optional
}

// next returns the body of the next member, which must be want. Reading it fails where the archive ends too early.
func (a *archive) next(want member) (io.Reader, error) {
	h, err := a.header(want.name)
	if err != nil {
		return nil, err
	}
	if err := a.check(h, want); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	a.seen[h.Name] = true
	return &body{r: a.tar, name: want.name}, nil
}

func (a *archive) header(want string) (*tar.Header, error) {
	if h := a.head; h != nil {
		a.head = nil
		return h, nil
	}
	h, err := a.tar.Next()
	if err == io.EOF {
		return nil, fmt.Errorf("%w: member %s is missing", ErrInvalid, want)
	}
	if err != nil {
		return nil, unreadable("before member "+want, err)
	}
	return h, nil
}

// check compares a header with the only one that its member can have. The first cases only make the reason clear.
func (a *archive) check(h *tar.Header, want member) error {
	switch {
	case h.Typeflag != tar.TypeReg:
		return fmt.Errorf("member %.200q is %s: a pack holds plain files only", h.Name, kind(h.Typeflag))
	case path.IsAbs(h.Name):
		return fmt.Errorf("member %.200q has an absolute path", h.Name)
	case h.Name == ".." || strings.Contains("/"+h.Name+"/", "/../"):
		return fmt.Errorf("member %.200q leads outside", h.Name)
	case a.seen[h.Name]:
		return fmt.Errorf("member %.200q comes twice", h.Name)
	case h.Name != want.name:
		return fmt.Errorf("member %.200q comes where %s should be", h.Name, want.name)
	case h.Size != want.bytes:
		return fmt.Errorf("member %s has %d bytes, the contents say %d", h.Name, h.Size, want.bytes)
	}
	exact := header(want)
	plain := h.Mode == exact.Mode && h.ModTime.Equal(exact.ModTime) && h.Linkname == "" && h.Uid == 0 && h.Gid == 0 &&
		h.Uname == "" && h.Gname == "" && h.Devmajor == 0 && h.Devminor == 0
	for key := range h.PAXRecords {
		plain = plain && key == "size" // of members beyond 8 GiB; above all nothing sparse
	}
	if !plain {
		return fmt.Errorf("member %s is not written the way forkd writes it", h.Name)
	}
	return nil
}

func kind(typeflag byte) string {
	switch typeflag {
	case tar.TypeLink:
		return "a hard link"
	case tar.TypeSymlink:
		return "a symbolic link"
	case tar.TypeDir:
		return "a directory"
	case tar.TypeChar, tar.TypeBlock:
		return "a device"
	case tar.TypeFifo:
		return "a pipe"
	}
	return fmt.Sprintf("of type %q", typeflag)
}

// small reads a member of any size up to limit.
func (a *archive) small(name string, limit int64) ([]byte, error) {
	h, err := a.header(name)
	if err != nil {
		return nil, err
	}
	a.head = h
	return a.sized(name, h, limit)
}

// optional is small for a member that need not be there: then it returns nil, and next will find the member that is.
func (a *archive) optional(name string, limit int64) ([]byte, error) {
	h, err := a.tar.Next()
	if err == io.EOF {
		return nil, nil // for next to say what is missing
	}
	if err != nil {
		return nil, unreadable("before member "+name, err)
	}
	a.head = h
	if h.Name != name {
		return nil, nil
	}
	return a.sized(name, h, limit)
}

func (a *archive) sized(name string, h *tar.Header, limit int64) ([]byte, error) {
	if h.Size > limit {
		return nil, fmt.Errorf("%w: member %s has %d bytes, the limit is %d", ErrInvalid, name, h.Size, limit)
	}
	r, err := a.next(member{name, h.Size})
	if err != nil {
		return nil, err
	}
	return io.ReadAll(r)
}

// end checks that nothing follows. It reads the stream to its end, where its checksum is.
func (a *archive) end() error {
	h, err := a.tar.Next()
	if err == nil {
		if err = a.check(h, member{name: "the end"}); err != nil {
			return fmt.Errorf("%w: %w", ErrInvalid, err)
		}
	}
	if err != io.EOF {
		return unreadable("at its end", err)
	}
	switch n, err := io.ReadFull(a.in, make([]byte, 1)); {
	case n > 0:
		return fmt.Errorf("%w: data behind its end", ErrInvalid)
	case err != io.EOF:
		return unreadable("at its end", err)
	}
	return nil
}

func unreadable(where string, err error) error {
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("%w: it is truncated: it ends %s", ErrInvalid, where)
	}
	return fmt.Errorf("%w: %s: %w", ErrInvalid, where, err)
}

// body is a member's bytes. All errors of it are the archive's fault, unless the reader of the whole pack says otherwise.
type body struct {
	r    io.Reader
	name string
}

func (b *body) Read(p []byte) (int, error) {
	n, err := b.r.Read(p)
	if err == nil || err == io.EOF {
		return n, err
	}
	return n, unreadable("in member "+b.name, err)
}
