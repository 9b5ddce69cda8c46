package memory

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// callRow is a system call for the table of batchCode.
type callRow struct {
	nr     uint64
	args   [6]uint64
	result uint64
}

const rowBytes = uint64(unsafe.Sizeof(callRow{}))

// batchWorth is how many calls it takes to be worth the four that a batch needs to set itself up.
const batchWorth = 8

// callAll makes many system calls and fills in their results. It stops at the first that fails, with its errno.
//
// Each call that is made by itself costs two stops and the waking up that goes with them, 30 to 150 µs; so many calls are
// made by a few instructions of ours, in a page that is mapped for it and unmapped again. If we die while they run, their final
// breakpoint ends the process.
func (r *remote) callAll(ctx context.Context, rows []callRow) error {
	if len(rows) >= batchWorth && r.breakpoints() {
		err := r.callBatch(ctx, rows)
		if !errors.Is(err, errNoBatch) {
			return err
		}
	}
	for i := range rows {
		var err error
		if rows[i].result, err = r.call(ctx, rows[i].nr, rows[i].args[:]...); err != nil {
			return err
		}
	}
	return nil
}

// errNoBatch says that nothing has been called because the process may not have code that is not from a file.
var errNoBatch = errors.New("no batches in this process")

// breakpoints reports whether the thread can be stopped by a breakpoint: the signal that it makes is neither blocked nor ignored,
// or the kernel would change the process's signal handling for good.
func (r *remote) breakpoints() bool {
	const bit = 1 << (unix.SIGTRAP - 1)
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/status", r.proc.PID, r.tid))
	if err != nil || r.mask&bit != 0 {
		return false
	}
	_, ignored, ok := strings.Cut(string(b), "\nSigIgn:\t")
	if !ok || len(ignored) < 16 {
		return false
	}
	set, err := strconv.ParseUint(ignored[:16], 16, 64)
	return err == nil && set&bit == 0
}

func (r *remote) callBatch(ctx context.Context, rows []callRow) (err error) {
	table := uint64(len(rows)) * rowBytes
	size := PageSize + (table+PageSize-1)/PageSize*PageSize
	code, err := r.call(ctx, unix.SYS_MMAP, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, ^uint64(0), 0)
	if err != nil {
		return fmt.Errorf("map a page for a batch of calls: %w", err)
	}
	defer func() {
		if _, e := r.call(ctx, unix.SYS_MUNMAP, code, size); e != nil {
			err = errors.Join(err, fmt.Errorf("unmap the page of a batch: %w", e))
		}
	}()
	b := unsafe.Slice((*byte)(unsafe.Pointer(&rows[0])), table)
	if err := r.copyMemory(code+PageSize, b, unix.ProcessVMWritev); err != nil {
		return err
	}
	stub := batchCode
	if err := r.copyMemory(code, stub[:], unix.ProcessVMWritev); err != nil {
		return err
	}
	if _, err := r.call(ctx, unix.SYS_MPROTECT, code, PageSize, unix.PROT_READ|unix.PROT_EXEC); err != nil {
		return errNoBatch
	}
	if err := r.runBatch(ctx, code, code+PageSize+table); err != nil {
		return err
	}
	return r.copyMemory(code+PageSize, b, unix.ProcessVMReadv)
}

// runBatch runs batchCode until its breakpoint.
func (r *remote) runBatch(ctx context.Context, code, end uint64) error {
	regs := r.saved
	loadBatch(&regs, code, code+PageSize, end)
	if err := unix.PtraceSetRegs(r.tid, &regs); err != nil {
		return fmt.Errorf("set registers: %w", err)
	}
	sig := 0
	for {
		if err := unix.PtraceCont(r.tid, sig); err != nil {
			return fmt.Errorf("go on: %w", err)
		}
		s, err := r.await(ctx)
		if err != nil {
			return fmt.Errorf("wait for a batch of calls: %w", err)
		}
		if s.kind == stopSignal && s.forced() {
			break
		}
		sig = s.deliver()
	}
	if err := unix.PtraceGetRegs(r.tid, &regs); err != nil {
		return fmt.Errorf("read registers: %w", err)
	}
	if !afterBatch(&regs, code) {
		return fmt.Errorf("a batch of calls ended at %#x, not at its end", regs.Rip)
	}
	if e := -int64(regs.Rax); e > 0 && e < 4096 {
		return fmt.Errorf("call %d of a batch: %w", (regs.Rbx-code-PageSize)/rowBytes, unix.Errno(e))
	}
	return nil
}

// copyMemory copies between b and the process, by one of the two calls for that.
func (r *remote) copyMemory(at uint64, b []byte, do func(int, []unix.Iovec, []unix.RemoteIovec, uint) (int, error)) error {
	local := unix.Iovec{Base: &b[0]}
	local.SetLen(len(b))
	n, err := do(r.proc.PID, []unix.Iovec{local}, []unix.RemoteIovec{{Base: uintptr(at), Len: len(b)}}, 0)
	if err == nil && n != len(b) {
		err = fmt.Errorf("%d of %d bytes", n, len(b))
	}
	if err != nil {
		return fmt.Errorf("copy a batch of calls: %w", err)
	}
	return nil
}
