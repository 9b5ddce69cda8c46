package memory

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// ErrInUse says that a resident image can't be dropped because somebody holds a reference or is loading it.
var ErrInUse = errors.New("resident image is in use")

// errAbandoned is the cause given to a load that nobody waits for any more.
var errAbandoned = errors.New("nobody waits for the image any more")

// Cache keeps resident images by snapshot id. References keep an image; unreferenced ones stay until the budget is exceeded and
// then go, least recently used first. The budget is soft: an image that is asked for is loaded even when all others are in use.
type Cache struct {
	budget int64
	ctx    context.Context // of the loads
	cancel context.CancelCauseFunc
	loads  sync.WaitGroup

	mu      sync.Mutex
	entries map[string]*entry
	flights map[string]*flight
	clock   uint64 // ticks at each use: the least recently used entry has the smallest value
	stats   Stats  // the counters only
}

// Stats describes a cache.
type Stats struct {
	Images    int    // resident
	Refs      int    // references to them
	Bytes     int64  // resident, memory that images share counted once
	Budget    int64  // bytes
	Hits      uint64 // acquired without loading
	Loads     uint64 // loads that succeeded
	Evictions uint64
}

type entry struct {
	img  *Image
	refs int
	used uint64
}

// flight is a load in progress. Its fields but done are guarded by the cache's mu.
type flight struct {
	done    chan struct{} // closed when finished
	waiters int
	cancel  context.CancelCauseFunc
	entry   *entry // with a reference for each waiter, when err is nil
	err     error
}

// Ref is a reference to a resident image.
type Ref struct {
	cache *Cache
	entry *entry
	once  sync.Once
}

// Image is the referenced image, valid until Release. It stays the cache's: do not close it.
func (r *Ref) Image() *Image { return r.entry.img }

// Release gives the reference back. Releasing twice is harmless.
func (r *Ref) Release() { r.once.Do(func() { r.cache.release(r.entry) }) }

// NewCache returns a cache that keeps unused images up to a budget in bytes; 0 evicts every image as soon as it is unused.
func NewCache(budget int64) *Cache {
	ctx, cancel := context.WithCancelCause(context.Background())
	return &Cache{budget: budget, ctx: ctx, cancel: cancel, entries: map[string]*entry{}, flights: map[string]*flight{}}
}

// Acquire returns a reference to the image of id, loading it first if need be: once, however many ask. The load's context ends
// when the last of those that wait has given up. A failed load is reported to all who waited for it and is not remembered. load
// may itself acquire other images of the cache.
func (c *Cache) Acquire(ctx context.Context, id string, load func(context.Context) (*Image, error)) (*Ref, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	c.mu.Lock()
	if e, ok := c.entries[id]; ok {
		c.stats.Hits++
		c.useLocked(e)
		c.mu.Unlock()
		return &Ref{cache: c, entry: e}, nil
	}
	f, ok := c.flights[id]
	if !ok {
		if err := context.Cause(c.ctx); err != nil {
			c.mu.Unlock()
			return nil, fmt.Errorf("resident image %s: %w", id, err)
		}
		f = c.startLocked(ctx, id, load)
	}
	f.waiters++
	c.mu.Unlock()
	return c.wait(ctx, id, f)
}

// startLocked begins a load on its own goroutine, which Close waits for. Values of the first caller's context reach the load.
func (c *Cache) startLocked(caller context.Context, id string, load func(context.Context) (*Image, error)) *flight {
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(caller))
	stop := context.AfterFunc(c.ctx, func() { cancel(context.Cause(c.ctx)) })
	f := &flight{done: make(chan struct{}), cancel: cancel}
	c.flights[id] = f
	c.loads.Add(1)
	go func() {
		defer c.loads.Done()
		defer stop()
		defer cancel(nil)
		img, err := load(ctx)
		c.finish(id, f, img, err)
	}()
	return f
}

func (c *Cache) finish(id string, f *flight, img *Image, err error) {
	c.mu.Lock()
	if c.flights[id] == f {
		delete(c.flights, id)
	}
	var unwanted []*Image
	switch {
	case err != nil:
		f.err = fmt.Errorf("resident image %s: %w", id, err)
	case f.waiters == 0: // abandoned, and yet it succeeded
		f.err = fmt.Errorf("resident image %s: %w", id, errAbandoned)
		unwanted = []*Image{img}
	default:
		unwanted = c.landLocked(id, f, img)
	}
	close(f.done)
	c.mu.Unlock()
	closeAll(unwanted)
}

// landLocked makes a loaded image resident, with a reference for each that waits, and returns the images to close.
func (c *Cache) landLocked(id string, f *flight, img *Image) []*Image {
	c.stats.Loads++
	var unwanted []*Image
	e, existed := c.entries[id]
	if existed { // Put came first
		unwanted = append(unwanted, img)
	} else {
		e = &entry{img: img}
		c.entries[id] = e
	}
	for range f.waiters {
		c.useLocked(e)
	}
	f.entry = e
	return append(unwanted, c.evictLocked()...)
}

func (c *Cache) wait(ctx context.Context, id string, f *flight) (*Ref, error) {
	select {
	case <-f.done:
	case <-ctx.Done():
		c.mu.Lock()
		if f.entry == nil && f.err == nil {
			f.waiters--
			if f.waiters == 0 {
				f.cancel(errAbandoned)
				if c.flights[id] == f {
					delete(c.flights, id) // whoever comes now starts afresh
				}
			}
			c.mu.Unlock()
			return nil, fmt.Errorf("resident image %s: %w", id, context.Cause(ctx))
		}
		c.mu.Unlock() // it finished at the same time
	}
	if f.err != nil {
		return nil, f.err
	}
	return &Ref{cache: c, entry: f.entry}, nil
}

// Put makes a fresh image resident; the cache owns it from then on. If id is resident already the given image is closed.
func (c *Cache) Put(id string, img *Image) { c.PutRef(id, img).Release() }

// PutRef is Put that returns a reference, so that the image stays while it is not on disk yet.
func (c *Cache) PutRef(id string, img *Image) *Ref {
	c.mu.Lock()
	e, existed := c.entries[id]
	if !existed {
		e = &entry{img: img}
		c.entries[id] = e
	}
	c.useLocked(e)
	victims := c.evictLocked()
	c.mu.Unlock()
	if existed && e.img != img {
		img.Close()
	}
	closeAll(victims)
	return &Ref{cache: c, entry: e}
}

// Drop makes id's image not resident. It wraps ErrInUse while there are references or a load; an unknown id is no error.
func (c *Cache) Drop(id string) error {
	c.mu.Lock()
	if f, ok := c.flights[id]; ok {
		n := f.waiters
		c.mu.Unlock()
		return fmt.Errorf("drop resident image %s: %w (being loaded for %d)", id, ErrInUse, n)
	}
	e, ok := c.entries[id]
	if !ok {
		c.mu.Unlock()
		return nil
	}
	if e.refs > 0 {
		n := e.refs
		c.mu.Unlock()
		return fmt.Errorf("drop resident image %s: %w (%d references)", id, ErrInUse, n)
	}
	delete(c.entries, id)
	c.mu.Unlock()
	return e.img.Close()
}

// Resident reports whether id's image is in memory.
func (c *Cache) Resident(id string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, ok := c.entries[id]
	return ok
}

// ResidentBytes is how many bytes of memory the files of id's image take, those shared with other images included; 0 when it is not in memory.
func (c *Cache) ResidentBytes(id string) int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e, ok := c.entries[id]; ok {
		return e.img.Resident()
	}
	return 0
}

// Stats counts what the cache holds.
func (c *Cache) Stats() Stats {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.stats
	s.Images, s.Budget = len(c.entries), c.budget
	for _, e := range c.entries {
		s.Refs += e.refs
	}
	s.Bytes = c.tallyLocked().total
	return s
}

// Close ends the loads, waits for them, and closes all images. Acquire fails from then on. Images that are still referenced are
// closed too: their children keep their mappings.
func (c *Cache) Close() error {
	c.cancel(errors.New("the cache of resident images is closed"))
	c.loads.Wait()
	c.mu.Lock()
	entries := c.entries
	c.entries = map[string]*entry{}
	c.mu.Unlock()
	var errs []error
	for _, e := range entries {
		errs = append(errs, e.img.Close())
	}
	return errors.Join(errs...)
}

func (c *Cache) useLocked(e *entry) {
	c.clock++
	e.used = c.clock
	e.refs++
}

func (c *Cache) release(e *entry) {
	c.mu.Lock()
	c.clock++
	e.used = c.clock
	e.refs--
	victims := c.evictLocked()
	c.mu.Unlock()
	closeAll(victims)
}

// evictLocked takes unused images out of the cache until it is within its budget, and returns them to be closed without the lock:
// giving back gigabytes takes a while. An image whose files all belong to other images too is left: its going would free nothing,
// and a snapshot that rests on it would have to load it a second time.
func (c *Cache) evictLocked() []*Image {
	var victims []*Image
	t := c.tallyLocked()
	for t.total > c.budget {
		id := c.victimLocked(t)
		if id == "" {
			break
		}
		img := c.entries[id].img
		delete(c.entries, id)
		t.remove(img)
		victims = append(victims, img)
		c.stats.Evictions++
	}
	return victims
}

func (c *Cache) victimLocked(t *tally) string {
	oldest := ""
	for id, e := range c.entries {
		if e.refs == 0 && t.frees(e.img) > 0 && (oldest == "" || e.used < c.entries[oldest].used) {
			oldest = id
		}
	}
	return oldest
}

func closeAll(images []*Image) {
	for _, img := range images {
		img.Close()
	}
}

// tally is how much memory the files of a set of images take, and how many of the images hold each.
type tally struct {
	total int64
	bytes map[*sharedFile]int64
	users map[*sharedFile]int
}

func (c *Cache) tallyLocked() *tally {
	t := &tally{bytes: map[*sharedFile]int64{}, users: map[*sharedFile]int{}}
	for _, e := range c.entries {
		for _, f := range e.img.files() {
			if t.users[f]++; t.users[f] == 1 {
				t.bytes[f] = residentBytes(f.file)
				t.total += t.bytes[f]
			}
		}
	}
	return t
}

func (t *tally) frees(img *Image) int64 {
	var n int64
	for _, f := range img.files() {
		if t.users[f] == 1 {
			n += t.bytes[f]
		}
	}
	return n
}

func (t *tally) remove(img *Image) {
	t.total -= t.frees(img)
	for _, f := range img.files() {
		t.users[f]--
	}
}

// residentBytes is the memory a memfd takes; 0 when it can't be told.
func residentBytes(f *os.File) int64 {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return 0
	}
	return st.Blocks * 512
}
