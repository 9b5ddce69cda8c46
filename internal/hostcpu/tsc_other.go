//go:build !amd64

package hostcpu

const hasTSC = false

func rdtsc() uint64 { return 0 }

func cpuid(leaf, subleaf uint32) (a, b, c, d uint32) { return 0, 0, 0, 0 }
