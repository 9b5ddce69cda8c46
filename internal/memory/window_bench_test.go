package memory

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

// BenchmarkCapture prints what a capture costs a guest that writes at full speed to 64 MiB of its memory, all of which is
// resident. The stall is the longest time that the guest took for one page, from the first protection to the last page
// captured; with mode "none" nothing is captured in as long a time, which shows what the machine's load alone does.
func BenchmarkCapture(b *testing.B) {
	needRoot(b)
	const written = 64 << 20 / PageSize
	for _, mib := range []uint64{256, 2048} {
		img := base(b, mib<<20/PageSize, written)
		for _, mode := range []Mode{"none", ModeLive, ModeDiff, ModeStop} {
			b.Run(fmt.Sprintf("mem=%dMiB/mode=%s", mib, mode), func(b *testing.B) {
				g := startGuest(b, img, guestConfig{Writers: areas(1, written)})
				g.do("read")
				g.do("start")
				g.advances(2 * written)
				var all []sample
				for b.Loop() {
					all = append(all, measure(b, g, mode))
				}
				report(b, all)
			})
		}
	}
}

type sample struct {
	CaptureTimes
	stall  time.Duration
	faults uint64
	wrote  uint64 // pages
}

func measure(b *testing.B, g *guest, mode Mode) sample {
	before := g.do("stats")
	var s sample
	if mode == "none" {
		start := time.Now()
		time.Sleep(50 * time.Millisecond) // as long as a capture takes
		s.After = time.Since(start)
	} else {
		c, err := Capture(b.Context(), g.target(), g.hooks(), CaptureOptions{Mode: mode})
		if err != nil {
			b.Fatal(err)
		}
		c.Layer.File.Close()
		s.CaptureTimes, s.faults = c.Times, c.Faults
	}
	after := g.do("stats")
	s.stall, s.wrote = time.Duration(after.StallNS), after.Written-before.Written
	return s
}

func report(b *testing.B, all []sample) {
	b.ReportMetric(0, "ns/op")
	for _, m := range []struct {
		name string
		of   func(sample) float64
	}{
		{"pause-ms", func(s sample) float64 { return ms(s.Pause) }},
		{"hold-ms", func(s sample) float64 { return ms(s.Hold) }},
		{"stall-ms", func(s sample) float64 { return ms(s.stall) }},
		{"ahead-ms", func(s sample) float64 { return ms(s.Ahead) }},
		{"after-ms", func(s sample) float64 { return ms(s.After) }},
		{"MiB/s", func(s sample) float64 {
			return float64(s.wrote) * PageSize / (1 << 20) / (s.Ahead + s.Pause + s.After).Seconds()
		}},
		{"faults", func(s sample) float64 { return float64(s.faults) }},
	} {
		values := make([]float64, len(all))
		for i, s := range all {
			values[i] = m.of(s)
		}
		slices.Sort(values)
		b.ReportMetric(values[len(values)/2], m.name+"-p50")
		b.ReportMetric(values[len(values)*9/10], m.name+"-p90")
	}
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
