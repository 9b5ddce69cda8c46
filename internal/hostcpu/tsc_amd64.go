package hostcpu

const hasTSC = true

// rdtsc reads the time stamp counter, after everything before it has been done.
func rdtsc() uint64

// cpuid executes CPUID.
func cpuid(leaf, subleaf uint32) (a, b, c, d uint32)
