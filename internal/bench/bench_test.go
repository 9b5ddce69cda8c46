package bench

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestPercentileIsNearestRank(t *testing.T) {
	ten := []int{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}
	for _, tt := range []struct {
		p    float64
		want int
	}{{0, 1}, {50, 5}, {90, 9}, {91, 10}, {99, 10}, {100, 10}} {
		if got := Percentile(ten, tt.p); got != tt.want {
			t.Errorf("p%v of 1 to 10: %d, want %d", tt.p, got, tt.want)
		}
	}
	if got := Percentile([]int(nil), 50); got != 0 {
		t.Errorf("p50 of nothing: %d, want 0", got)
	}
}

func TestSummariseCountsFailures(t *testing.T) {
	start := time.Now()
	child := func(ready, answer int) Child {
		d := func(n int) time.Duration { return time.Duration(n) * time.Millisecond }
		return Child{Ready: d(ready), Answer: d(answer), End: start.Add(d(answer))}
	}
	failed := child(1, 1)
	failed.Err = errors.New("no answer")
	got := Summarise([]Child{child(10, 20), failed, child(30, 60), failed}, start)
	want := Run{N: 4, Failed: 2, Errors: []Count{{"no answer", 2}},
		Ready: Times{P50MS: 10, P90MS: 30, P99MS: 30, AllMS: 30}, Answer: Times{P50MS: 20, P90MS: 60, P99MS: 60, AllMS: 60}}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("summary (-want +got):\n%s", d)
	}
}
