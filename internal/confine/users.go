package confine

import (
	"fmt"
	"hash/fnv"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// DefaultUIDs are user ids that no distribution hands out: behind those of systemd's containers (see "Users, Groups, UIDs and GIDs on systemd
// systems").
var DefaultUIDs = UIDRange{First: 1_900_000_000, N: 65536}

// RangeFor returns the ids for a daemon that is told apart from others on its host by a name. There are so many ranges that two daemons hardly
// ever have the same; to be sure, they are given ranges.
func RangeFor(name string) UIDRange {
	const ranges = 3000
	h := fnv.New32a()
	_, _ = h.Write([]byte(name))
	return UIDRange{First: DefaultUIDs.First + h.Sum32()%ranges*DefaultUIDs.N, N: DefaultUIDs.N}
}

// UIDRange is a range of user ids; the group ids are the same.
type UIDRange struct{ First, N uint32 }

// Users hands out user ids: no two processes that live have the same.
type Users struct {
	ids UIDRange

	mu   sync.Mutex
	used map[uint32]bool
	next uint32 // of the range: where to look first, so that one that was just given back is not handed out at once
}

// NewUsers returns what hands out the ids of a range.
func NewUsers(ids UIDRange) *Users { return &Users{ids: ids, used: map[uint32]bool{}} }

// take hands out an id.
func (u *Users) take() (uint32, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for range u.ids.N {
		id := u.ids.First + u.next
		u.next = (u.next + 1) % u.ids.N
		if !u.used[id] {
			u.used[id] = true
			return id, nil
		}
	}
	return 0, fmt.Errorf("all %d user ids from %d on are in use", u.ids.N, u.ids.First)
}

// Adopt keeps the id of a process that an earlier daemon started from being handed out, until it is released. 0 is for a process of another user.
func (u *Users) Adopt(pid int) uint32 {
	var st unix.Stat_t
	if err := unix.Stat(fmt.Sprintf("/proc/%d", pid), &st); err != nil || st.Uid < u.ids.First || st.Uid-u.ids.First >= u.ids.N {
		return 0
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.used[st.Uid] = true
	return st.Uid
}

// Release takes an id back. Preconditions: its process has ended.
func (u *Users) Release(id uint32) {
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.used, id)
}

// own makes a file that a process inherits one that it may open anew, by /proc/self/fd.
func own(f *os.File, uid uint32) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return err
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFIFO:
		return unix.Fchown(int(f.Fd()), int(uid), int(uid))
	case unix.S_IFREG:
		// Of an image, below a directory that nobody but the daemon can enter: others may read it who are given it.
		if st.Mode&0o004 == 0 {
			return unix.Fchmod(int(f.Fd()), st.Mode&0o7777|0o044)
		}
	}
	return nil
}
