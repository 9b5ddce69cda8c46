// Package thread sets how threads of this process are scheduled, so that guests wait for none of them longer than they must. A host that does
// not allow it has longer waits, no more: nothing here fails.
package thread

import (
	"os"
	"runtime"
	"strconv"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// cores is how many threads of ours can run at a time; more than that run Go code after Widen.
var cores = runtime.GOMAXPROCS(0)

// Cores returns how many goroutines get work done at the same time.
func Cores() int { return cores }

// spare is for threads that must not wait for one of Go's processors when they come back from a system call: those of First.
const spare = 8

// Widen lets more goroutines have a thread than there are processors. Go would have one that must run at once wait until another gives way,
// which takes up to 10 ms; the kernel preempts for it at once.
func Widen() { runtime.GOMAXPROCS(cores + spare) }

// behind is the nice value of work in the background: a tenth of a guest thread's weight.
const behind = 10

// Behind has the calling goroutine run behind guests and requests for the rest of its life, on a thread of its own. It is for work that nobody
// waits for within milliseconds.
func Behind() {
	runtime.LockOSThread() // for good: the thread ends with the goroutine, and its priority with it
	_ = unix.Setpriority(unix.PRIO_PROCESS, 0, behind)
}

// First has the calling goroutine run as soon as it can for the rest of its life, on a thread of its own. It is for one that a guest's thread
// waits for, and that runs for microseconds.
func First() {
	runtime.LockOSThread() // as in Behind
	schedule(unix.SCHED_RR, 1)
}

// Briefly runs f as soon as possible and without being kept from the processor: it holds something that a guest's thread may wait for.
func Briefly(f func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	schedule(unix.SCHED_RR, 1)
	defer schedule(unix.SCHED_NORMAL, 0)
	return f()
}

// Yield lets another thread that waits for this processor go first. Without it, one that works on and on keeps it until the next tick of the
// host's clock, some milliseconds.
func Yield() { _, _, _ = unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0) }

// Pacer keeps work in the background from taking a processor whole. Where all processors are busy, a host with a quota takes them away from
// everybody, guests too, for tens of milliseconds at a time.
type Pacer struct {
	share float64
	begin time.Time
}

// paced is for how long one works between two rests: short beside the period of a quota, usually 100 ms.
const paced = 4 * time.Millisecond

// Pace returns a Pacer for work that begins now and rests share times as long as it works.
func Pace(share float64) *Pacer { return &Pacer{share, time.Now()} }

// Rest rests, when it is time to, and says whether it did.
func (p *Pacer) Rest() bool {
	worked := time.Since(p.begin)
	if worked < paced {
		return false
	}
	time.Sleep(time.Duration(float64(worked) * p.share))
	p.begin = time.Now()
	return true
}

// resetOnFork is SCHED_RESET_ON_FORK: threads that this one starts are scheduled as usual (sched_setscheduler(2)).
const resetOnFork = 0x40000000

// schedule sets the policy of this thread. Its nice value stays.
func schedule(policy, priority int32) {
	_, _, _ = unix.RawSyscall(unix.SYS_SCHED_SETSCHEDULER, 0, uintptr(policy)|resetOnFork, uintptr(unsafe.Pointer(&priority)))
}

// ahead is the nice value of a process whose threads sleep nearly always and are waited for when they don't: three times a guest thread's weight.
const ahead = -5

// briefSlice is how long a thread of such a process asks to run at a time, the least that the kernel takes. From Linux 6.12 on it may then preempt
// at once one that asks for longer, as all do that ask for nothing (sched_setattr(2)); older ones look at the weight.
const briefSlice = 100 * time.Microsecond

// Ahead has all threads of this process come before guests' when they wake up. Threads inherit that, and so do processes: it is for a program that
// starts none, and is called early, while there are few threads. For the daemon it was not measured to change anything (bench/README.md).
func Ahead() {
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return
	}
	for _, t := range tasks {
		if tid, err := strconv.Atoi(t.Name()); err == nil {
			attend(tid, ahead, briefSlice)
		}
	}
}

// attend sets how a thread is scheduled.
func attend(tid, nice int, slice time.Duration) {
	attr := unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_NORMAL, Nice: int32(nice), Runtime: uint64(slice)}
	_ = unix.SchedSetAttr(tid, &attr, 0)
}
