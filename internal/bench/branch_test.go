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
		name   string
		of     span
		offset time.Duration
		want   time.Duration
	}{
		{"ends in it", span{at(190), at(295)}, 0, 7 * time.Millisecond},
		{"begins in it", span{at(270), at(320)}, 0, 90 * time.Millisecond},
		{"nothing", span{at(500), at(600)}, 0, 0},
		{"clocks that differ", span{at(0), at(100)}, 600 * time.Millisecond, 60 * time.Millisecond},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := saw.longestGap(tt.of, tt.offset); got != tt.want {
				t.Errorf("longest gap: got %v, want %v", got, tt.want)
			}
		})
	}
}

func TestSummariseBranches(t *testing.T) {
	begin := time.Unix(1000, 0)
	span := func(from, to int) span {
		return span{begin.Add(time.Duration(from) * time.Millisecond), begin.Add(time.Duration(to) * time.Millisecond)}
	}
	samples := []sample{
		{idle: span(0, 100), busy: span(100, 300), snap: client.Snapshot{PauseMS: 2, DiffPhysicalBytes: 60 << 20, Warning: "diff instead"}},
		{idle: span(400, 500), busy: span(500, 600), err: errors.New("no")},
	}
	saw := writerResult{Seconds: 2, Bytes: 100 << 20, Rounds: 3, Gaps: [][2]int64{{begin.Add(200 * time.Millisecond).UnixNano(), 4e6}}}
	got := summariseBranches(samples, saw, 0)
	want := &BranchRun{N: 2, Failed: 1, Errors: []Count{{"no", 1}}, Warnings: []Count{{"diff instead", 1}}, PauseMS: Millis{2, 2, 2},
		GuestStallMS: Millis{4, 4, 4}, ReadyMS: Millis{200, 200, 200}, LayerMiB: 60, WroteMiBPerS: 50, RewroteRounds: 3}
	if diff := cmp.Diff(got, want, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("summary (-got +want):\n%s", diff)
	}
}
