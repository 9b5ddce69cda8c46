// Package stage holds a static program of a few hundred bytes that is started in the place of a monitor, receives what that is to inherit,
// installs its seccomp filter, and executes it; and it sends what that program receives. Firecracker's jailer needs it, too: it passes on no
// descriptors but three, and copies the program that it is given into each jail: it gets this one, of which a copy costs nothing.
//
// stage.S says what the program does; stage.bin is what it assembles to, see generate.go. This package knows neither jails nor monitors.
package stage

import (
	_ "embed"
	"encoding/binary"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

//go:embed stage.bin
var code []byte

// Addresses that stage.S has, too.
const (
	codeAt    = 0x400000
	messageAt = 0x500000
	room      = 0x10000 // for a message
	roomInAll = 0x20000 // for what is behind it as well
)

// firstFree is the descriptor that the first file becomes.
const firstFree = 3

// Program is the program as an ELF file, of which the kernel loads the code and room for a message.
func Program() []byte {
	const header, segment, segments, page = 64, 56, 2, 4096
	b := make([]byte, page, page+len(code))
	copy(b, "\x7fELF\x02\x01\x01")
	le := binary.LittleEndian
	le.PutUint16(b[16:], 2)      // an executable
	le.PutUint16(b[18:], 62)     // for x86-64
	le.PutUint32(b[20:], 1)      // version
	le.PutUint64(b[24:], codeAt) // entry
	le.PutUint64(b[32:], header) // segments are behind this header
	le.PutUint16(b[52:], header)
	le.PutUint16(b[54:], segment)
	le.PutUint16(b[56:], segments)
	put := func(p []byte, flags uint32, offset, at, inFile, inMemory uint64) {
		le.PutUint32(p[0:], 1) // to load
		le.PutUint32(p[4:], flags)
		le.PutUint64(p[8:], offset)
		le.PutUint64(p[16:], at)
		le.PutUint64(p[24:], at)
		le.PutUint64(p[32:], inFile)
		le.PutUint64(p[40:], inMemory)
		le.PutUint64(p[48:], page)
	}
	put(b[header:], 5, page, codeAt, uint64(len(code)), uint64(len(code))) // read and execute
	put(b[header+segment:], 6, 0, messageAt, 0, roomInAll)                 // read and write
	return append(b, code...)
}

// Message is what the program is to do.
type Message struct {
	Program string // what it executes, with the arguments that it was started with itself
	Dir     string // where
	Env     []string
	Filter  []unix.SockFilter // a seccomp filter for it
	Files   []*os.File        // its descriptors from 3 on
	Stdin   *os.File          // its descriptor 0, which is the socket until then
}

// Fields of a message, as stage.S has them.
const (
	atSize = 4 * iota
	atStdin
	atProgram
	_
	atDir
	_
	atEnv
	_
	atFilter
	_
	atFilterAt
	fields = 48
)

// encode returns the message as the memory of the program at messageAt.
func (m Message) encode() ([]byte, error) {
	le := binary.LittleEndian
	b := make([]byte, fields)
	here := func() uint64 { return messageAt + uint64(len(b)) }
	text := func(s string) uint64 {
		at := here()
		b = append(append(b, s...), 0)
		return at
	}
	le.PutUint64(b[atFilterAt:], here())
	le.PutUint16(b[atFilter:], uint16(len(m.Filter)))
	for _, i := range m.Filter {
		b = le.AppendUint32(append(le.AppendUint16(b, i.Code), i.Jt, i.Jf), i.K)
	}
	var env []uint64
	for _, s := range m.Env {
		env = append(env, text(s))
	}
	program, dir := text(m.Program), text(m.Dir)
	for len(b)%8 != 0 {
		b = append(b, 0)
	}
	list := here()
	for _, at := range append(env, 0) {
		b = le.AppendUint64(b, at)
	}
	le.PutUint64(b[atProgram:], program)
	le.PutUint64(b[atDir:], dir)
	le.PutUint64(b[atEnv:], list)
	le.PutUint32(b[atStdin:], uint32(firstFree+len(m.Files)))
	le.PutUint32(b[atSize:], uint32(len(b)))
	if len(b) >= room || len(m.Filter) > 1<<12 {
		return nil, fmt.Errorf("a message of %d bytes for %s: %d are the most", len(b), m.Program, room-1)
	}
	return b, nil
}

// maxRights is how many descriptors the kernel takes at a time.
const maxRights = 250

// Send writes a message to a socket, whose other end is, or will be, the program's descriptor 0. It does not wait for the program. The socket is
// to be closed then.
func Send(socket *os.File, m Message) error {
	b, err := m.encode()
	if err != nil {
		return err
	}
	var rights []int
	for _, f := range append(m.Files[:len(m.Files):len(m.Files)], m.Stdin) {
		rights = append(rights, int(f.Fd()))
	}
	for len(rights) > maxRights { // each lot comes with a byte at least
		if err := send(socket, b[:1], rights[:maxRights]); err != nil {
			return err
		}
		b, rights = b[1:], rights[maxRights:]
	}
	return send(socket, b, rights)
}

func send(socket *os.File, b []byte, rights []int) error {
	n, err := unix.SendmsgN(int(socket.Fd()), b, unix.UnixRights(rights...), nil, 0)
	if err == nil && n < len(b) {
		err = fmt.Errorf("%d of %d bytes", n, len(b))
	}
	if err != nil {
		return fmt.Errorf("hand over %d descriptors: %w", len(rights), err)
	}
	return nil
}
