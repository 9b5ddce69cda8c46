package agent

import (
	"errors"
	"os"
	"strconv"
	"strings"
	"syscall"
)

// user is who a command runs as.
type user struct {
	name, home, shell string
	uid, gid          uint32
	groups            []uint32
}

var errNoUser = errors.New("no such user or group")

// lookUser resolves "name", "uid", "name:group" or "uid:gid" with the files of root. A uid that has no entry is used as it is.
func lookUser(root, spec string) (*user, error) {
	if spec == "" {
		spec = "root"
	}
	name, group, withGroup := strings.Cut(spec, ":")
	u, err := passwdEntry(root, name)
	if err != nil {
		return nil, err
	}
	if withGroup {
		gid, err := groupID(root, group)
		if err != nil {
			return nil, err
		}
		u.gid = gid
	}
	u.groups = append([]uint32{u.gid}, supplementary(root, u)...)
	return u, nil
}

func passwdEntry(root, name string) (*user, error) {
	uid, numErr := strconv.ParseUint(name, 10, 32)
	for f := range colonFile(root + "/etc/passwd") {
		if len(f) < 7 || (f[0] != name && (numErr != nil || f[2] != name)) {
			continue
		}
		id, err1 := strconv.ParseUint(f[2], 10, 32)
		gid, err2 := strconv.ParseUint(f[3], 10, 32)
		if err1 != nil || err2 != nil {
			continue
		}
		u := &user{name: f[0], home: f[5], shell: f[6], uid: uint32(id), gid: uint32(gid)}
		if u.home == "" {
			u.home = "/"
		}
		if u.shell == "" {
			u.shell = "/bin/sh"
		}
		return u, nil
	}
	switch {
	case numErr == nil:
		return &user{name: name, home: "/", shell: "/bin/sh", uid: uint32(uid), gid: uint32(uid)}, nil
	case name == "root":
		// A root file system without accounts still has its superuser.
		return &user{name: "root", home: "/root", shell: "/bin/sh"}, nil
	}
	return nil, errNoUser
}

func groupID(root, name string) (uint32, error) {
	for f := range colonFile(root + "/etc/group") {
		if len(f) >= 3 && f[0] == name {
			id, err := strconv.ParseUint(f[2], 10, 32)
			return uint32(id), err
		}
	}
	id, err := strconv.ParseUint(name, 10, 32)
	if err != nil {
		return 0, errNoUser
	}
	return uint32(id), nil
}

func supplementary(root string, u *user) []uint32 {
	var gids []uint32
	for f := range colonFile(root + "/etc/group") {
		if len(f) < 4 {
			continue
		}
		for _, member := range strings.Split(f[3], ",") {
			if id, err := strconv.ParseUint(f[2], 10, 32); member == u.name && err == nil && uint32(id) != u.gid {
				gids = append(gids, uint32(id))
			}
		}
	}
	return gids
}

// colonFile iterates over the fields of the lines of a file like /etc/passwd; a file that is not there has none.
func colonFile(path string) func(yield func([]string) bool) {
	return func(yield func([]string) bool) {
		data, err := readFile(path)
		if err != nil {
			return
		}
		for line := range strings.SplitSeq(string(data), "\n") {
			if line == "" || line[0] == '#' {
				continue
			}
			if !yield(strings.Split(line, ":")) {
				return
			}
		}
	}
}

// credential is nil when the agent already is that user, so that it need not be privileged then.
func (u *user) credential() *syscall.Credential {
	if int(u.uid) == os.Getuid() && int(u.gid) == os.Getgid() {
		return nil
	}
	return &syscall.Credential{Uid: u.uid, Gid: u.gid, Groups: u.groups}
}

// defaultUser is who runs what names no user.
func (a *Agent) defaultUser() string {
	if a.opt.Sandboxed {
		return strconv.Itoa(os.Getuid())
	}
	return "root"
}
