package thread

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestPace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		p := Pace(0.5)
		if p.Rest() {
			t.Error("it rested before it worked")
		}
		time.Sleep(10 * time.Millisecond) // stands for work
		if !p.Rest() {
			t.Error("it did not rest after 10 ms of work")
		}
		if got, want := time.Since(begin), 15*time.Millisecond; got != want {
			t.Errorf("after the rest: got %v, want %v", got, want)
		}
		if p.Rest() {
			t.Error("it rested twice for the same work")
		}
	})
}
