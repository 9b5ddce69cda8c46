package confine

import (
	"github.com/elastic/go-seccomp-bpf"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// denied are system calls that no monitor has a use for and that reach beyond what it was given: into the kernel's less used parts, or into
// other processes. Monitors have filters of their own as well. What is not listed a monitor may do, as far as everything else lets it.
var denied = []string{
	// Other namespaces and mounts; user namespaces give capabilities in them.
	"unshare", "setns", "mount", "umount2", "pivot_root", "chroot", "open_tree", "move_mount", "fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr",
	// Other processes.
	"ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_open", "pidfd_getfd", "process_madvise",
	// Kernel interfaces with a record of faults.
	"bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "io_uring_enter", "io_uring_register", "keyctl", "add_key", "request_key",
	"fanotify_init", "name_to_handle_at", "open_by_handle_at", "lookup_dcookie", "vmsplice",
	// The host as a whole.
	"init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "reboot", "swapon", "swapoff", "syslog", "acct", "quotactl",
	"settimeofday", "clock_settime", "clock_adjtime", "adjtimex", "sethostname", "setdomainname", "iopl", "ioperm", "personality", "vhangup",
}

// newNamespaces are clone's flags that make namespaces: what unshare does, in other words. (CLONE_NEWTIME is no flag of clone.)
const newNamespaces = unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWCGROUP

// notThere is an answer that makes a C library do without a call.
const notThere = seccomp.Action(unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS))

// instructions are the filter of a cell: a call that is denied fails with EPERM. Sockets are of the Unix family only: others are not needed, and not
// all of them are kept apart by namespaces. clone3 has its flags where no filter sees them: there is no such call, and libraries make do with clone.
func instructions() ([]bpf.Instruction, error) {
	policy := seccomp.Policy{DefaultAction: seccomp.ActionAllow, Syscalls: []seccomp.SyscallGroup{
		{Action: seccomp.ActionErrno, Names: denied},
		{Action: notThere, Names: []string{"clone3"}},
		{Action: seccomp.ActionErrno, NamesWithCondtions: []seccomp.NameWithConditions{{Name: "socket",
			Conditions: seccomp.ArgumentConditions{{Argument: 0, Operation: seccomp.NotEqual, Value: unix.AF_UNIX}}}}},
		{Action: seccomp.ActionErrno, NamesWithCondtions: []seccomp.NameWithConditions{{Name: "clone",
			Conditions: seccomp.ArgumentConditions{{Argument: 0, Operation: seccomp.BitsSet, Value: newNamespaces}}}}},
	}}
	ours, err := policy.Assemble()
	if err != nil {
		return nil, err
	}
	// The library lets calls of other architectures through, such as int 0x80, by which all of the above could be had under other numbers.
	const archAt = 4 // in struct seccomp_data
	return append([]bpf.Instruction{
		bpf.LoadAbsolute{Off: archAt, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.AUDIT_ARCH_X86_64, SkipTrue: 1},
		bpf.RetConstant{Val: unix.SECCOMP_RET_KILL_PROCESS},
	}, ours...), nil
}

// newFilter returns the filter as the kernel takes it.
func newFilter() ([]unix.SockFilter, error) {
	list, err := instructions()
	if err != nil {
		return nil, err
	}
	raw, err := bpf.Assemble(list)
	if err != nil {
		return nil, err
	}
	program := make([]unix.SockFilter, len(raw))
	for i, r := range raw {
		program[i] = unix.SockFilter{Code: r.Op, Jt: r.Jt, Jf: r.Jf, K: r.K}
	}
	return program, nil
}
