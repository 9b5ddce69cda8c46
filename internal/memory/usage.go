package memory

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// Usage is the memory of one monitor process. KiB as the kernel reports them.
type Usage struct {
	GuestAnonKiB   int64 // guest pages of its own: what the sandbox adds to its snapshot
	GuestSharedKiB int64 // guest pages in memory that it has in common with its snapshot
	GuestPSSKiB    int64 // its proportional share of guest memory
	PSSKiB         int64 // its proportional share of everything, guest memory included
	RSSKiB         int64 // resident pages of everything, shared ones counted whole
}

// memfdName begins the path of a guest memory mapping in /proc/PID/maps: what New calls its memfds.
const memfdName = "/memfd:forkd-"

// Measure reads the memory use of process pid from /proc/PID/smaps. Guest memory is what maps the memfds of img, told by their
// inodes; with a nil img, or when the process maps none of them, it is what maps any memfd that New made, told by the name.
func Measure(pid int, img *Image) (Usage, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/smaps", pid))
	if err != nil {
		return Usage{}, fmt.Errorf("memory of process %d: %w", pid, err)
	}
	defer f.Close()
	wanted := map[inode]bool{}
	if img != nil {
		for _, file := range img.files() {
			if id, err := inodeOf(file.file); err == nil {
				wanted[id] = true
			}
		}
	}
	u, err := parseSmaps(f, wanted)
	if err != nil {
		return Usage{}, fmt.Errorf("memory of process %d: %w", pid, err)
	}
	return u, nil
}

// inode names a file as /proc/PID/maps does.
type inode struct {
	major, minor uint32
	ino          uint64
}

func inodeOf(f *os.File) (inode, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return inode{}, err
	}
	return inode{unix.Major(st.Dev), unix.Minor(st.Dev), st.Ino}, nil
}

// parseSmaps sums up the mappings of /proc/PID/smaps.
func parseSmaps(r io.Reader, wanted map[inode]bool) (Usage, error) {
	var u Usage
	var byInode, byName guestShare
	matched := false // some mapping belongs to a wanted inode
	var inInode, inName bool
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 64<<10), 1<<20)
	for lines.Scan() {
		line := lines.Bytes()
		if id, path, ok := parseMapping(line); ok {
			inInode, inName = wanted[id], bytes.HasPrefix(path, []byte(memfdName))
			matched = matched || inInode
			continue
		}
		key, kib, ok := parseKiB(line)
		if !ok {
			continue
		}
		switch string(key) {
		case "Rss":
			u.RSSKiB += kib
		case "Pss":
			u.PSSKiB += kib
		}
		if inInode {
			byInode.add(key, kib)
		}
		if inName {
			byName.add(key, kib)
		}
	}
	if err := lines.Err(); err != nil {
		return Usage{}, err
	}
	guest := byName
	if matched {
		guest = byInode
	}
	u.GuestAnonKiB, u.GuestSharedKiB, u.GuestPSSKiB = guest.anon, max(guest.resident-guest.own, 0), guest.pss
	return u, nil
}

type guestShare struct{ anon, resident, own, pss int64 }

func (g *guestShare) add(key []byte, kib int64) {
	switch string(key) {
	case "Anonymous":
		g.anon += kib
		g.own += kib
	case "Rss":
		g.resident += kib
	case "Swap": // pages of its own that were swapped out
		g.anon += kib
	case "Pss":
		g.pss += kib
	}
}

// parseMapping reads "7f12a000-7f13a000 rw-p 00000000 00:01 1234 /memfd:forkd-x (deleted)".
func parseMapping(line []byte) (inode, []byte, bool) {
	fields := bytes.Fields(line)
	if len(fields) < 5 || bytes.IndexByte(fields[0], '-') < 0 || bytes.HasSuffix(fields[0], []byte(":")) {
		return inode{}, nil, false
	}
	major, minor, ok := bytes.Cut(fields[3], []byte(":"))
	if !ok {
		return inode{}, nil, false
	}
	ma, err1 := strconv.ParseUint(string(major), 16, 32)
	mi, err2 := strconv.ParseUint(string(minor), 16, 32)
	ino, err3 := strconv.ParseUint(string(fields[4]), 10, 64)
	if err1 != nil || err2 != nil || err3 != nil {
		return inode{}, nil, false
	}
	var path []byte
	if len(fields) > 5 {
		path = fields[5]
	}
	return inode{uint32(ma), uint32(mi), ino}, path, true
}

// parseKiB reads "Anonymous:           12 kB".
func parseKiB(line []byte) (key []byte, kib int64, ok bool) {
	fields := bytes.Fields(line)
	if len(fields) != 3 || string(fields[2]) != "kB" || !bytes.HasSuffix(fields[0], []byte(":")) {
		return nil, 0, false
	}
	kib, err := strconv.ParseInt(string(fields[1]), 10, 64)
	return fields[0][:len(fields[0])-1], kib, err == nil
}
