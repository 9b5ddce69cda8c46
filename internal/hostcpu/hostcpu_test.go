package hostcpu

import (
	"runtime"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
)

func TestRead(t *testing.T) {
	tests := []struct {
		name    string
		cpuinfo string
		want    Info
		virtual bool
		stable  bool
	}{
		{
			name:    "virtual machine",
			cpuinfo: "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel name\t: AMD EPYC\nflags\t\t: tsc constant_tsc nonstop_tsc hypervisor\n\nprocessor\t: 1\nmodel name\t: other\n",
			want: Info{Vendor: "AuthenticAMD", Family: "25", Model: "AMD EPYC",
				Flags: map[string]bool{"tsc": true, "constant_tsc": true, "nonstop_tsc": true, "hypervisor": true}},
			virtual: true,
			stable:  true,
		},
		{
			name:    "counter that stops",
			cpuinfo: "vendor_id : GenuineIntel\nflags : tsc constant_tsc\n",
			want:    Info{Vendor: "GenuineIntel", Flags: map[string]bool{"tsc": true, "constant_tsc": true}},
		},
		{name: "empty", want: Info{Flags: map[string]bool{}}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := Read(fstest.MapFS{"proc/cpuinfo": {Data: []byte(tt.cpuinfo)}})
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(got, tt.want); d != "" {
				t.Errorf("Read() (-got +want):\n%s", d)
			}
			if got.Virtualised() != tt.virtual || got.StableTSC() != tt.stable {
				t.Errorf("Virtualised, StableTSC = %v, %v, want %v, %v", got.Virtualised(), got.StableTSC(), tt.virtual, tt.stable)
			}
		})
	}
	if _, err := Read(fstest.MapFS{}); err == nil {
		t.Error("Read() without cpuinfo: no error")
	}
}

func TestSources(t *testing.T) {
	type regs [4]uint32
	fake := func(leaves map[uint32]regs) cpuidFunc {
		return func(leaf, _ uint32) (a, b, c, d uint32) {
			r := leaves[leaf]
			return r[0], r[1], r[2], r[3]
		}
	}
	tests := []struct {
		name       string
		leaves     map[uint32]regs
		processor  uint64
		hypervisor uint64
	}{
		{name: "says nothing"},
		{name: "crystal and ratio", leaves: map[uint32]regs{0: {0x16}, 0x15: {2, 216, 24_000_000}}, processor: 2_592_000},
		{name: "no crystal", leaves: map[uint32]regs{0: {0x16}, 0x15: {2, 216, 0}}},
		{name: "leaf is beyond the highest", leaves: map[uint32]regs{0: {0xd}, 0x15: {2, 216, 24_000_000}}},
		{name: "hypervisor", leaves: map[uint32]regs{1: {0, 0, 1 << 31}, 0x40000000: {0x40000010}, 0x40000010: {2_445_406}}, hypervisor: 2_445_406},
		{name: "hypervisor without the leaf", leaves: map[uint32]regs{1: {0, 0, 1 << 31}, 0x40000000: {0x40000001}, 0x40000010: {1}}},
		{name: "no hypervisor", leaves: map[uint32]regs{0x40000000: {0x40000010}, 0x40000010: {2_445_406}}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := fromCPUID(fake(tt.leaves)); got != tt.processor {
				t.Errorf("fromCPUID() = %d, want %d", got, tt.processor)
			}
			if got := fromHypervisor(fake(tt.leaves)); got != tt.hypervisor {
				t.Errorf("fromHypervisor() = %d, want %d", got, tt.hypervisor)
			}
		})
	}
}

func TestChooseTSC(t *testing.T) {
	tests := []struct {
		name                            string
		measured, processor, hypervisor uint64
		want                            TSC
	}{
		{"processor agrees", 2_000_100, 2_000_000, 2_000_200, TSC{2_000_000, "cpuid"}},
		{"processor is about another counter", 2_000_100, 3_000_000, 2_000_000, TSC{2_000_000, "hypervisor"}},
		{"nobody says", 2_000_100, 0, 0, TSC{2_000_100, "measured"}},
		{"nobody agrees", 2_000_100, 3_000_000, 1_000_000, TSC{2_000_100, "measured"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := chooseTSC(tt.measured, tt.processor, tt.hypervisor); got != tt.want {
				t.Errorf("chooseTSC() = %v, want %v", got, tt.want)
			}
		})
	}
}

func TestCompatible(t *testing.T) {
	tests := []struct {
		name string
		a, b uint64
		want bool
	}{
		{"equal", 2_445_406, 2_445_406, true},
		{"just within", 1_000_000, 999_000, true},
		{"just beyond", 1_000_000, 998_999, false},
		{"order does not matter", 998_999, 1_000_000, false},
		{"unknown", 0, 2_445_406, false},
		{"both unknown", 0, 0, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := Compatible(tt.a, tt.b); got != tt.want {
				t.Errorf("Compatible(%d, %d) = %v, want %v", tt.a, tt.b, got, tt.want)
			}
		})
	}
}

func TestRate(t *testing.T) {
	if got, err := rate(sample{1000, 5}, sample{1000 + 122_270_300, 5 + 50_000_000}); got != 2_445_406 || err != nil {
		t.Errorf("rate() = %d, %v, want 2445406", got, err)
	}
	if _, err := rate(sample{1000, 5}, sample{1000, 10}); err == nil {
		t.Error("rate() of a counter that stands still: no error")
	}
	if _, err := rate(sample{1000, 5}, sample{2000, 5}); err == nil {
		t.Error("rate() without time passed: no error")
	}
}

func TestFindTSCIsStable(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		t.Skip("only amd64 has a time stamp counter")
	}
	first, err := FindTSC()
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		got, err := FindTSC()
		if err != nil {
			t.Fatal(err)
		}
		if !Compatible(got.KHz, first.KHz) {
			t.Errorf("FindTSC() = %v, want near %v", got, first)
		}
		t.Logf("%d kHz, %s", got.KHz, got.Source)
	}
}
