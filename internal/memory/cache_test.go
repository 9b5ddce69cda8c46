package memory

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
)

const imagePages = 64

// testImage takes pages pages of memory.
func testImage(t testing.TB, pages uint64) *Image {
	t.Helper()
	img, err := NewImage(sealed(t, newRAM(t, imagePages, 1, Extent{0, pages})))
	if err != nil {
		t.Fatal(err)
	}
	return img
}

func loads(img *Image) func(context.Context) (*Image, error) {
	return func(context.Context) (*Image, error) { return img, nil }
}

func noLoad(context.Context) (*Image, error) { return nil, errors.New("must not load") }

func acquire(t *testing.T, c *Cache, id string, load func(context.Context) (*Image, error)) *Ref {
	t.Helper()
	ref, err := c.Acquire(t.Context(), id, load)
	if err != nil {
		t.Fatal(err)
	}
	return ref
}

func isClosed(img *Image) bool {
	_, err := img.Base().Stat()
	return errors.Is(err, os.ErrClosed)
}

func TestCacheLoadsOnce(t *testing.T) {
	c := NewCache(1 << 30)
	defer c.Close()
	img := testImage(t, 4)
	var calls atomic.Int32
	start := make(chan struct{})
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			ref, err := c.Acquire(t.Context(), "a", func(context.Context) (*Image, error) {
				calls.Add(1)
				<-start
				return img, nil
			})
			if err != nil || ref.Image() != img {
				t.Errorf("got %v, %v", ref, err)
				return
			}
			ref.Release()
			ref.Release()
		})
	}
	close(start)
	wg.Wait()
	if got := calls.Load(); got != 1 {
		t.Errorf("got %d loads, want 1", got)
	}
	if s := c.Stats(); s.Refs != 0 || s.Images != 1 || s.Bytes != 4*PageSize || s.Loads != 1 {
		t.Errorf("got %+v, want no references to 1 image of 4 pages", s)
	}
}

func TestCacheFailedLoadIsForgotten(t *testing.T) {
	c := NewCache(1 << 30)
	defer c.Close()
	broken := errors.New("disk on fire")
	if _, err := c.Acquire(t.Context(), "a", func(context.Context) (*Image, error) { return nil, broken }); !errors.Is(err, broken) {
		t.Errorf("got %v, want %v", err, broken)
	}
	acquire(t, c, "a", loads(testImage(t, 1))).Release()
}

func TestCacheCancelledWaiterLeavesOthersAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := NewCache(1 << 30)
		img := testImage(t, 1)
		finish := make(chan struct{})
		load := func(ctx context.Context) (*Image, error) {
			select {
			case <-finish:
				return img, nil
			case <-ctx.Done():
				return nil, context.Cause(ctx)
			}
		}
		first, cancel := context.WithCancel(t.Context())
		errs := make(chan error, 2)
		go func() { _, err := c.Acquire(first, "a", load); errs <- err }()
		synctest.Wait()
		go func() { _, err := c.Acquire(t.Context(), "a", noLoad); errs <- err }()
		synctest.Wait()
		cancel()
		if err := <-errs; !errors.Is(err, context.Canceled) {
			t.Errorf("the one that gave up: got %v, want %v", err, context.Canceled)
		}
		close(finish)
		if err := <-errs; err != nil {
			t.Errorf("the one that waited: got %v", err)
		}
		if s := c.Stats(); s.Refs != 1 {
			t.Errorf("got %d references, want 1", s.Refs)
		}
		c.Close()
	})
}

func TestCacheAbandonedLoadIsCancelled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := NewCache(1 << 30)
		ctx, cancel := context.WithCancel(t.Context())
		cause := make(chan error, 1)
		abandoned := testImage(t, 1)
		go func() {
			_, _ = c.Acquire(ctx, "a", func(ctx context.Context) (*Image, error) {
				<-ctx.Done()
				cause <- context.Cause(ctx)
				return abandoned, nil // too late to notice
			})
		}()
		synctest.Wait()
		cancel()
		if err := <-cause; !errors.Is(err, errAbandoned) {
			t.Errorf("got %v, want %v", err, errAbandoned)
		}
		synctest.Wait()
		if !isClosed(abandoned) || c.Resident("a") {
			t.Error("an image nobody asked for is kept")
		}
		acquire(t, c, "a", loads(testImage(t, 1))).Release()
		c.Close()
	})
}

func TestCacheEvictsLeastRecentlyUsed(t *testing.T) {
	c := NewCache(10 * PageSize)
	defer c.Close()
	images := map[string]*Image{}
	for _, id := range []string{"a", "b", "c"} {
		images[id] = testImage(t, 3)
		c.Put(id, images[id])
	}
	acquire(t, c, "a", noLoad).Release() // a is younger than b now
	held := acquire(t, c, "c", noLoad)
	defer held.Release()
	c.Put("d", testImage(t, 3))
	for id, want := range map[string]bool{"a": true, "b": false, "c": true, "d": true} {
		if got := c.Resident(id); got != want {
			t.Errorf("%s resident: got %v, want %v", id, got, want)
		}
	}
	if !isClosed(images["b"]) {
		t.Error("the evicted image was not closed")
	}
	big := acquire(t, c, "big", loads(testImage(t, 20))) // more than the budget: all that is unused goes, the rest stays
	if s := c.Stats(); s.Images != 2 || s.Bytes != 23*PageSize {
		t.Errorf("got %+v, want c and big", s)
	}
	big.Release()
	if c.Resident("big") || !c.Resident("c") {
		t.Error("the image over the budget stays when it is unused, or the used one goes")
	}
}

func TestCacheDrop(t *testing.T) {
	c := NewCache(1 << 30)
	defer c.Close()
	if err := c.Drop("unknown"); err != nil {
		t.Errorf("drop an unknown id: got %v", err)
	}
	img := testImage(t, 1)
	ref := c.PutRef("a", img)
	if err := c.Drop("a"); !errors.Is(err, ErrInUse) {
		t.Errorf("drop while referenced: got %v, want %v", err, ErrInUse)
	}
	ref.Release()
	if err := c.Drop("a"); err != nil || !isClosed(img) {
		t.Errorf("drop: got %v, closed %v", err, isClosed(img))
	}
}

func TestCachePutTwiceKeepsTheFirst(t *testing.T) {
	c := NewCache(1 << 30)
	defer c.Close()
	first, second := testImage(t, 1), testImage(t, 1)
	c.Put("a", first)
	ref := c.PutRef("a", second)
	defer ref.Release()
	if ref.Image() != first || !isClosed(second) {
		t.Error("the second image replaced the first, or was not closed")
	}
}

// TestCacheFamily shows that a base is held once however many images rest on it, and that an ancestor is not evicted under them.
func TestCacheFamily(t *testing.T) {
	c := NewCache(12 * PageSize)
	defer c.Close()
	root := testImage(t, 8)
	c.Put("root", root)
	for i := range 2 {
		f := sealed(t, newRAM(t, imagePages, 2, Extent{uint64(i), 1}))
		child, err := root.Derive(Layer{f, []Extent{{uint64(i), 1}}})
		if err != nil {
			t.Fatal(err)
		}
		c.Put(fmt.Sprint("child", i), child)
	}
	if s := c.Stats(); s.Bytes != 10*PageSize || s.Images != 3 {
		t.Errorf("got %+v, want 3 images of 10 pages", s)
	}
	// Four pages too many. The root is the oldest, but its going frees nothing while children rest on it: they go first.
	c.Put("other", testImage(t, 4))
	for id, want := range map[string]bool{"root": true, "child0": false, "child1": false, "other": true} {
		if got := c.Resident(id); got != want {
			t.Errorf("%s resident: got %v, want %v", id, got, want)
		}
	}
	if isClosed(root) {
		t.Error("the root was closed with its children")
	}
}

func TestCacheNestedAcquire(t *testing.T) {
	c := NewCache(1 << 30)
	defer c.Close()
	root := testImage(t, 2)
	ref := acquire(t, c, "tip", func(ctx context.Context) (*Image, error) {
		parent, err := c.Acquire(ctx, "root", loads(root))
		if err != nil {
			return nil, err
		}
		defer parent.Release()
		return parent.Image().Derive()
	})
	defer ref.Release()
	if !c.Resident("root") || ref.Image().Base() != root.Base() {
		t.Error("the parent is not resident or not shared")
	}
}

func TestCacheClose(t *testing.T) {
	c := NewCache(1 << 30)
	img := testImage(t, 1)
	c.Put("a", img)
	loading := make(chan struct{})
	failed := make(chan error)
	go func() {
		_, err := c.Acquire(context.WithoutCancel(t.Context()), "b", func(ctx context.Context) (*Image, error) {
			close(loading)
			<-ctx.Done()
			return nil, context.Cause(ctx)
		})
		failed <- err
	}()
	<-loading
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if err := <-failed; err == nil {
		t.Error("a load outlived Close")
	}
	if !isClosed(img) {
		t.Error("an image outlived Close")
	}
	if _, err := c.Acquire(t.Context(), "c", loads(testImage(t, 1))); err == nil {
		t.Error("Acquire after Close: got no error")
	}
}

// TestCacheConcurrent is for the race detector, and checks that a referenced image is never closed.
func TestCacheConcurrent(t *testing.T) {
	c := NewCache(6 * PageSize)
	var wg sync.WaitGroup
	for worker := range 8 {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(worker), 0))
			for range 100 {
				id := fmt.Sprint(rnd.IntN(5))
				ref, err := c.Acquire(t.Context(), id, func(context.Context) (*Image, error) { return testImage(t, 2), nil })
				if err != nil {
					t.Error(err)
					return
				}
				if isClosed(ref.Image()) {
					t.Error("a referenced image is closed")
				}
				if rnd.IntN(4) == 0 {
					_ = c.Drop(id)
				}
				ref.Release()
			}
		})
	}
	wg.Wait()
	if s := c.Stats(); s.Refs != 0 || s.Bytes > 6*PageSize {
		t.Errorf("got %+v, want no references and at most 6 pages", s)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
}
