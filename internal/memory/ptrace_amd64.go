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

// batchCode makes the system calls of a table, from Rbx up to Rbp, until one fails, and ends with a breakpoint. A row is the
// number of the call, six arguments, and room for the result.
//
//	loop:	cmp %rbp,%rbx; jae done
//		mov (%rbx),%rax; mov 8(%rbx),%rdi; mov 16(%rbx),%rsi; mov 24(%rbx),%rdx
//		mov 32(%rbx),%r10; mov 40(%rbx),%r8; mov 48(%rbx),%r9; syscall
//		mov %rax,56(%rbx); add $64,%rbx; cmp $-4096,%rax; jbe loop
//	done:	int3
var batchCode = [...]byte{
	0x48, 0x39, 0xeb, 0x73, 0x2d,
	0x48, 0x8b, 0x03, 0x48, 0x8b, 0x7b, 0x08, 0x48, 0x8b, 0x73, 0x10, 0x48, 0x8b, 0x53, 0x18,
	0x4c, 0x8b, 0x53, 0x20, 0x4c, 0x8b, 0x43, 0x28, 0x4c, 0x8b, 0x4b, 0x30, 0x0f, 0x05,
	0x48, 0x89, 0x43, 0x38, 0x48, 0x83, 0xc3, 0x40, 0x48, 0x3d, 0x00, 0xf0, 0xff, 0xff, 0x76, 0xce,
	0xcc,
}

// loadBatch sets the registers for batchCode at address code over the table [from, to).
func loadBatch(r *unix.PtraceRegs, code, from, to uint64) {
	r.Rip, r.Orig_rax, r.Rbx, r.Rbp = code, noSyscall, from, to
}

// afterBatch reports whether a thread with these registers stands behind batchCode's end.
func afterBatch(r *unix.PtraceRegs, code uint64) bool {
	return r.Rip == code+uint64(len(batchCode))
}
