package bench

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/forkd/forkd/client"
)

func TestLongestGap(t *testing.T) {
	begin := time.Unix(1000, 0)
	at := func(ms int) time.Time { return begin.Add(time.Duration(ms) * time.Millisecond) }
	gap := func(end, length int) [2]int64 {
		return [2]int64{at(end).UnixNano(), int64(length) * int64(time.Millisecond)}
	}
	saw := writerResult{Gaps: [][2]int64{gap(50, 30), gap(205, 7), gap(290, 5), gap(400, 90), gap(700, 60)}}
	tests := []struct {
		name string
		of   span
		want time.Duration
	}{
		{"ends in it", span{from: at(190), to: at(295)}, 7 * time.Millisecond},
		{"begins in it", span{from: at(270), to: at(320)}, 90 * time.Millisecond},
		{"nothing", span{from: at(500), to: at(600)}, 0},
		{"clocks that differ", span{from: at(0), to: at(100), fromAhead: 600 * time.Millisecond, toAhead: 560 * time.Millisecond}, 60 * time.Millisecond},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := saw.longestGap(tt.of); got != tt.want {
				t.Errorf("longest gap: got %v, want %v", got, tt.want)
			}
		})
	}
}

func TestSummariseBranches(t *testing.T) {
	begin := time.Unix(1000, 0)
	span := func(from, to int) span {
		return span{from: begin.Add(time.Duration(from) * time.Millisecond), to: begin.Add(time.Duration(to) * time.Millisecond), toAhead: -2 * time.Millisecond}
	}
	samples := []sample{
		{idle: span(0, 100), busy: span(100, 300), resumed: begin.Add(150 * time.Millisecond),
			snap: client.SnapshotDetail{PauseMS: 2, DiffPhysicalBytes: 60 << 20, Warning: "diff instead"}},
		{idle: span(400, 500), busy: span(500, 600), err: errors.New("no")},
	}
	saw := writerResult{Seconds: 2, Bytes: 100 << 20, Rounds: 3, Gaps: [][2]int64{{begin.Add(149 * time.Millisecond).UnixNano(), 3e6}, {begin.Add(200 * time.Millisecond).UnixNano(), 4e6}}}
	got := summariseBranches(samples, saw)
	want := &BranchRun{N: 2, Failed: 1, Errors: []Count{{"no", 1}}, Warnings: []Count{{"diff instead", 1}}, PauseMS: Millis{2, 2, 2},
		GuestStallMS: Millis{5, 5, 5}, // the shorter gap, with the pause in it
		GuestClockMS: Millis{4, 4, 4}, ClockStops: true, ReadyMS: Millis{200, 200, 200}, LayerMiB: 60, WroteMiBPerS: 50, RewroteRounds: 3}
	if diff := cmp.Diff(got, want, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("summary (-got +want):\n%s", diff)
	}
}
