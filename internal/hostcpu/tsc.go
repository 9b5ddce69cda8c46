package hostcpu

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// TSC is the rate of the host's time stamp counter. Guests that run here see the same rate.
type TSC struct {
	KHz    uint64
	Source string // "cpuid" or "hypervisor", which are exact, or "measured"
}

// measureFor is how long the counter is watched. The clock is read to about 100 ns, which makes an error of a few millionths.
const measureFor = 50 * time.Millisecond

// Tolerance is the part of a rate, as 1/Tolerance, by which two rates of one machine may differ.
const Tolerance = 1000

// TSCkHz is the rate of FindTSC, for those who don't ask where it comes from.
func TSCkHz() (uint64, error) {
	tsc, err := FindTSC()
	return tsc.KHz, err
}

// FindTSC finds the rate. It takes about 50 ms, and results differ by some millionths where the rate has to be measured: compare
// them with Compatible.
//
// What the processor or the hypervisor says is exact but may be about another counter than the one a virtual machine sees (scaled,
// or copied from another host), so it is believed only when the measurement agrees.
func FindTSC() (TSC, error) {
	measured, err := measureTSC(measureFor)
	if err != nil {
		return TSC{}, fmt.Errorf("find the rate of the time stamp counter: %w", err)
	}
	return chooseTSC(measured, fromCPUID(cpuid), fromHypervisor(cpuid)), nil
}

func chooseTSC(measured, processor, hypervisor uint64) TSC {
	if Compatible(processor, measured) {
		return TSC{processor, "cpuid"}
	}
	if Compatible(hypervisor, measured) {
		return TSC{hypervisor, "hypervisor"}
	}
	return TSC{measured, "measured"}
}

// Compatible tells whether two rates in kHz can be those of one machine: they differ by 0.1 % at most.
func Compatible(a, b uint64) bool {
	return a > 0 && b > 0 && max(a, b)-min(a, b) <= max(a, b)/Tolerance
}

// cpuidFunc executes CPUID and returns EAX, EBX, ECX and EDX.
type cpuidFunc func(leaf, subleaf uint32) (a, b, c, d uint32)

// fromCPUID reads leaf 0x15: the counter runs at ECX·EBX/EAX Hz (Intel SDM, CPUID). It is 0 where that is not said. Leaf 0x16 gives
// the nominal frequency only, rounded to MHz.
func fromCPUID(cpuid cpuidFunc) uint64 {
	const leaf = 0x15
	if highest, _, _, _ := cpuid(0, 0); highest < leaf {
		return 0
	}
	a, b, c, _ := cpuid(leaf, 0)
	if a == 0 || b == 0 || c == 0 {
		return 0
	}
	return uint64(c) * uint64(b) / uint64(a) / 1000
}

// fromHypervisor reads leaf 0x40000010, where hypervisors give the rate in kHz in EAX. It is 0 where that is not said.
func fromHypervisor(cpuid cpuidFunc) uint64 {
	const first, leaf = 0x40000000, 0x40000010
	if _, _, c, _ := cpuid(1, 0); c&(1<<31) == 0 {
		return 0 // no hypervisor
	}
	if highest, _, _, _ := cpuid(first, 0); highest < leaf {
		return 0
	}
	a, _, _, _ := cpuid(leaf, 0)
	return uint64(a)
}

// sample is a reading of counter and clock at one moment.
type sample struct {
	tsc   uint64
	nanos int64 // CLOCK_MONOTONIC_RAW
}

func measureTSC(d time.Duration) (uint64, error) {
	if !hasTSC {
		return 0, errors.New("only amd64 has one")
	}
	first, err := readBoth()
	if err != nil {
		return 0, err
	}
	time.Sleep(d)
	last, err := readBoth()
	if err != nil {
		return 0, err
	}
	return rate(first, last)
}

func rate(first, last sample) (uint64, error) {
	nanos := last.nanos - first.nanos
	if nanos <= 0 || last.tsc <= first.tsc {
		return 0, errors.New("the counter does not advance with the clock")
	}
	// Ticks in 50 ms times 10^6 stay far below 2^64.
	return ((last.tsc-first.tsc)*1e6 + uint64(nanos)/2) / uint64(nanos), nil
}

// readBoth reads the counter before and after the clock and keeps the closest of several tries: those that were not interrupted.
func readBoth() (sample, error) {
	const tries = 64
	var best sample
	closest := ^uint64(0)
	for range tries {
		before := rdtsc()
		var ts unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_MONOTONIC_RAW, &ts); err != nil {
			return sample{}, fmt.Errorf("read clock: %w", err)
		}
		after := rdtsc()
		if after >= before && after-before < closest {
			closest = after - before
			best = sample{before + closest/2, ts.Nano()}
		}
	}
	if closest == ^uint64(0) {
		return sample{}, errors.New("the counter runs backwards")
	}
	return best, nil
}
