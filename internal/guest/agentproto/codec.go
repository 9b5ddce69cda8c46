package agentproto

import "errors"

// ErrMalformed is returned for a message that does not decode.
var ErrMalformed = errors.New("malformed agent message")

func le32(b []byte) uint32 {
	_ = b[3]
	return uint32(b[0]) | uint32(b[1])<<8 | uint32(b[2])<<16 | uint32(b[3])<<24
}

func le64(b []byte) uint64 {
	_ = b[7]
	return uint64(le32(b)) | uint64(le32(b[4:]))<<32
}

func append32(dst []byte, v uint32) []byte {
	return append(dst, byte(v), byte(v>>8), byte(v>>16), byte(v>>24))
}

func append64(dst []byte, v uint64) []byte {
	return append(dst, byte(v), byte(v>>8), byte(v>>16), byte(v>>24), byte(v>>32), byte(v>>40), byte(v>>48), byte(v>>56))
}

func appendBool(dst []byte, v bool) []byte {
	if v {
		return append(dst, 1)
	}
	return append(dst, 0)
}

func appendString(dst []byte, s string) []byte { return append(append32(dst, uint32(len(s))), s...) }

func appendBytes(dst, b []byte) []byte { return append(append32(dst, uint32(len(b))), b...) }

func appendStrings(dst []byte, list []string) []byte {
	dst = append32(dst, uint32(len(list)))
	for _, s := range list {
		dst = appendString(dst, s)
	}
	return dst
}

// cursor reads a message; after the first field that is missing or too long everything it returns is zero.
type cursor struct {
	b   []byte
	bad bool
}

func (c *cursor) take(n uint32) []byte {
	if c.bad || uint64(n) > uint64(len(c.b)) {
		c.bad = true
		return nil
	}
	b := c.b[:n]
	c.b = c.b[n:]
	return b
}

func (c *cursor) u8() byte {
	if b := c.take(1); b != nil {
		return b[0]
	}
	return 0
}

func (c *cursor) bool() bool { return c.u8() != 0 }

func (c *cursor) u16() uint16 {
	if b := c.take(2); b != nil {
		return uint16(b[0]) | uint16(b[1])<<8
	}
	return 0
}

func (c *cursor) u32() uint32 {
	if b := c.take(4); b != nil {
		return le32(b)
	}
	return 0
}

func (c *cursor) i64() int64 {
	if b := c.take(8); b != nil {
		return int64(le64(b))
	}
	return 0
}

func (c *cursor) string() string { return string(c.take(c.u32())) }

// bytes copies, so that a message does not keep the buffer it came in.
func (c *cursor) bytes() []byte {
	b := c.take(c.u32())
	if len(b) == 0 {
		return nil
	}
	return append(make([]byte, 0, len(b)), b...)
}

func (c *cursor) strings() []string {
	n := c.u32()
	// Every string takes four bytes at least: a count beyond that is a lie and must not be allocated for.
	if c.bad || uint64(n) > uint64(len(c.b)/4) {
		c.bad = true
		return nil
	}
	if n == 0 {
		return nil
	}
	list := make([]string, n)
	for i := range list {
		list[i] = c.string()
	}
	return list
}

func (c *cursor) err() error {
	if c.bad {
		return ErrMalformed
	}
	return nil
}
