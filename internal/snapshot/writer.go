package snapshot

import (
	"context"
	"crypto/sha256"
	"os"
	"sync"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/thread"
)

// writebackBytes is how much is written before the disk is told to begin: it works while the rest is being hashed.
const writebackBytes = 8 << 20

// memoryWriter writes a memory file. One goroutine fills chunks, one per core hashes and compresses them, one writes, in order.
type memoryWriter struct {
	file     *os.File
	compress bool
	hook     func(Step) error
	check    func(j *job) error // after hashing; nil: any chunk will do
	gently   bool               // see Staging.Gently

	buffers sync.Pool // of *[]byte, ChunkBytes long
}

// job is a chunk on its way through the pipeline.
type job struct {
	index  int     // of the chunk
	pages  *[]byte // pooled
	n      int     // bytes of pages
	sum    [digestBytes]byte
	out    []byte        // what goes to the file
	hashed chan struct{} // closed when sum and out are there
}

// write stores the source's pages that are not zero, and returns their index, without zero extents.
func (w *memoryWriter) write(ctx context.Context, src *source) (*index, error) {
	x := &index{logical: src.bytes}
	err := w.run(ctx, x, func(emit func(*job) error) error {
		p := packer{w: w, emit: emit}
		err := p.pack(src)
		x.data = p.data
		return err
	})
	return x, err
}

// run writes the chunks that produce emits and notes their digests and sizes in x.
func (w *memoryWriter) run(ctx context.Context, x *index, produce func(emit func(*job) error) error) error {
	w.buffers.New = func() any { b := make([]byte, ChunkBytes); return &b }
	x.sums, x.stored = nil, nil
	workers := thread.Cores()
	if w.gently {
		workers = 1
	}
	group, ctx := errgroup.WithContext(ctx)
	toHash := make(chan *job, workers)
	toWrite := make(chan *job, 2*workers)
	group.Go(func() error {
		thread.Behind()
		defer close(toHash)
		defer close(toWrite)
		return produce(func(j *job) error { return send(ctx, j, toWrite, toHash) })
	})
	for range workers {
		group.Go(func() error {
			thread.Behind()
			return w.hash(toHash)
		})
	}
	group.Go(func() error {
		thread.Behind()
		return w.writeChunks(ctx, toWrite, x)
	})
	return group.Wait()
}

func (w *memoryWriter) newJob(index int) *job {
	return &job{index: index, pages: w.buffers.Get().(*[]byte), hashed: make(chan struct{})}
}

// send queues a job for writing first, so that the order of the file is the order of the pages.
func send(ctx context.Context, j *job, queues ...chan<- *job) error {
	for _, q := range queues {
		select {
		case q <- j:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

func (w *memoryWriter) hash(in <-chan *job) error {
	var enc *zstd.Encoder
	if w.compress {
		var err error
		enc, err = zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1), zstd.WithEncoderCRC(false))
		if err != nil {
			return err
		}
		defer enc.Close()
	}
	pace := thread.Pace(gentleRest)
	for j := range in {
		raw := (*j.pages)[:j.n]
		j.sum, j.out = sha256.Sum256(raw), raw
		if w.check != nil {
			if err := w.check(j); err != nil {
				return err
			}
		}
		if enc != nil {
			if small := enc.EncodeAll(raw, nil); len(small) < len(raw)-len(raw)/16 {
				j.out = small
			}
		}
		close(j.hashed)
		if !w.gently || !pace.Rest() {
			thread.Yield()
		}
	}
	return nil
}

// gentleRest is how long a gentle writer rests for the time it hashed: reading and writing is work, too.
const gentleRest = 3

func (w *memoryWriter) writeChunks(ctx context.Context, in <-chan *job, x *index) error {
	var offset, started int64
	for j := range in {
		select {
		case <-j.hashed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		if err := w.hook(StepChunk); err != nil {
			return err
		}
		if _, err := w.file.Write(j.out); err != nil {
			return err
		}
		x.sums = append(x.sums, j.sum)
		x.stored = append(x.stored, uint32(len(j.out)))
		offset += int64(len(j.out))
		w.buffers.Put(j.pages)
		if offset-started >= writebackBytes {
			// Only a hint: where it is not supported, Publish's fsync does it all.
			_ = unix.SyncFileRange(int(w.file.Fd()), started, offset-started, unix.SYNC_FILE_RANGE_WRITE)
			started = offset
		}
	}
	return nil
}

// packer reads the data of a source and fills chunks with its pages that are not zero.
type packer struct {
	w    *memoryWriter
	emit func(*job) error
	data []memory.Extent // pages emitted so far or in the current chunk
	cur  *job
	done int // chunks emitted
}

func (p *packer) pack(src *source) error {
	for _, e := range src.data {
		for e.N > 0 {
			n, err := p.fill(src, e)
			if err != nil {
				return err
			}
			e = memory.Extent{First: e.First + n, N: e.N - n}
		}
	}
	if p.cur != nil && p.cur.n > 0 {
		return p.flush()
	}
	return nil
}

// fill reads as many pages of e as fit behind the current chunk's and keeps those that are not zero. It returns how many it read.
func (p *packer) fill(src *source, e memory.Extent) (uint64, error) {
	if p.cur == nil {
		p.cur = p.w.newJob(p.done)
	}
	free := (*p.cur.pages)[p.cur.n:]
	window := free[:min(int64(len(free)), e.Bytes())]
	if _, err := src.ReadAt(window, e.Offset()); err != nil {
		return 0, err
	}
	kept := 0
	for off := 0; off < len(window); {
		run := pagesUntilZero(window[off:])
		if run > 0 {
			if kept != off {
				copy(window[kept:], window[off:off+run])
			}
			p.note(memory.Extent{First: e.First + uint64(off/memory.PageSize), N: uint64(run / memory.PageSize)})
			kept += run
			off += run
		}
		for off < len(window) && memory.IsZeroPage(window[off:off+memory.PageSize]) {
			off += memory.PageSize
		}
	}
	if p.cur.n += kept; p.cur.n == ChunkBytes {
		if err := p.flush(); err != nil {
			return 0, err
		}
	}
	return uint64(len(window) / memory.PageSize), nil
}

// pagesUntilZero is how many bytes of whole pages come before the first page of zeros.
func pagesUntilZero(b []byte) int {
	n := 0
	for n < len(b) && !memory.IsZeroPage(b[n:n+memory.PageSize]) {
		n += memory.PageSize
	}
	return n
}

func (p *packer) note(e memory.Extent) {
	if n := len(p.data); n > 0 && p.data[n-1].End() == e.First {
		p.data[n-1].N += e.N
		return
	}
	p.data = append(p.data, e)
}

func (p *packer) flush() error {
	j := p.cur
	p.cur = nil
	p.done++
	return p.emit(j)
}
