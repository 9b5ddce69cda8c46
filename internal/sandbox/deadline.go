package sandbox

import (
	"container/heap"
	"context"
	"sync"
	"time"
)

// deadlines calls expire for every sandbox whose deadline has passed. expire must look at the deadline again under the sandbox's own
// lock: it may have been extended meanwhile.
type deadlines struct {
	expire func(id string)

	mu   sync.Mutex
	heap deadlineHeap
	byID map[string]*deadline
	wake chan struct{} // the earliest deadline may have changed
}

type deadline struct {
	id    string
	at    time.Time
	index int
}

func newDeadlines(expire func(id string)) *deadlines {
	return &deadlines{expire: expire, byID: map[string]*deadline{}, wake: make(chan struct{}, 1)}
}

// set arms, moves or, with the zero time, removes the deadline of a sandbox.
func (d *deadlines) set(id string, at time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	entry := d.byID[id]
	switch {
	case entry == nil && at.IsZero():
		return
	case entry == nil:
		entry = &deadline{id: id, at: at}
		d.byID[id] = entry
		heap.Push(&d.heap, entry)
	case at.IsZero():
		heap.Remove(&d.heap, entry.index)
		delete(d.byID, id)
	default:
		entry.at = at
		heap.Fix(&d.heap, entry.index)
	}
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

// run expires deadlines until ctx ends. It waits for the calls of expire that it started.
func (d *deadlines) run(ctx context.Context) {
	var calls sync.WaitGroup
	defer calls.Wait()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		for _, id := range d.due(time.Now()) {
			calls.Go(func() { d.expire(id) })
		}
		if next, ok := d.next(); ok {
			timer.Reset(time.Until(next))
		} else {
			timer.Stop()
		}
		select {
		case <-timer.C:
		case <-d.wake:
		case <-ctx.Done():
			return
		}
	}
}

// due takes out the sandboxes whose deadline has come.
func (d *deadlines) due(now time.Time) []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	var ids []string
	for len(d.heap) > 0 && !d.heap[0].at.After(now) {
		entry := heap.Pop(&d.heap).(*deadline)
		delete(d.byID, entry.id)
		ids = append(ids, entry.id)
	}
	return ids
}

func (d *deadlines) next() (time.Time, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.heap) == 0 {
		return time.Time{}, false
	}
	return d.heap[0].at, true
}

// deadlineHeap implements heap.Interface, earliest first.
type deadlineHeap []*deadline

func (h deadlineHeap) Len() int           { return len(h) }
func (h deadlineHeap) Less(i, j int) bool { return h[i].at.Before(h[j].at) }
func (h deadlineHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}

func (h *deadlineHeap) Push(x any) {
	entry := x.(*deadline)
	entry.index = len(*h)
	*h = append(*h, entry)
}

func (h *deadlineHeap) Pop() any {
	old := *h
	entry := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	return entry
}
