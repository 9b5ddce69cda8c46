package memory

import "golang.org/x/sys/unix"

// What injecting system calls needs to know of the architecture.

// syscallInsn is the instruction `syscall`.
var syscallInsn = [...]byte{0x0f, 0x05}

// userCode64 is the code segment of 64-bit code; a thread in 32-bit code has other registers and another instruction.
const userCode64 = 0x33

// noSyscall in Orig_rax keeps the kernel from restarting a system call that isn't one.
const noSyscall = ^uint64(0)

// inSyscall reports whether a thread with these registers stands behind a system call it has made.
func inSyscall(r *unix.PtraceRegs) bool { return int64(r.Orig_rax) >= 0 }

// loadCall sets the registers for a system call at the instruction gate.
func loadCall(r *unix.PtraceRegs, gate, nr uint64, args []uint64) {
	r.Rip, r.Rax, r.Orig_rax = gate, nr, noSyscall
	to := [...]*uint64{&r.Rdi, &r.Rsi, &r.Rdx, &r.R10, &r.R8, &r.R9}
	for i, a := range args {
		*to[i] = a
	}
}

// rewind makes registers seen at the entry of a system call those of the moment before it.
func rewind(r *unix.PtraceRegs, gate uint64) {
	r.Rip, r.Rax, r.Orig_rax = gate, r.Orig_rax, noSyscall
}
