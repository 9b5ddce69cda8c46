// Package audit keeps a record of who asked for what and what came of it: JSON lines that are only ever appended to, each with the SHA-256 of
// the line before, so that a line that is changed, dropped or moved is found by Verify.
//
// The record is a directory. Lines go to the newest of its files, audit-<number of its first line>.jsonl, until that is large; the chain goes on
// from file to file. The file "head" has the numbers of the first and the last line and the digest of the last: it tells when lines are missing
// at either end. Who can write to the directory can make the whole record anew; only a head that is kept elsewhere shows that
// (VerifyOptions.Head).
package audit

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/forkd/forkd/internal/filelock"
)

// Entry is a line of the record. Seq, Time if it is zero, and Prev are set by Append.
type Entry struct {
	Seq        uint64          `json:"seq"` // from 1
	Time       time.Time       `json:"time"`
	RequestID  string          `json:"request_id,omitempty"`
	Principal  string          `json:"principal"`        // who, such as "uid 0" or the name of a key
	Tenant     string          `json:"tenant,omitempty"` // whose things it was about
	Remote     string          `json:"remote,omitempty"` // where the request came from
	Action     string          `json:"action"`           // such as "POST /v1/sandboxes"
	Target     string          `json:"target,omitempty"` // such as the id of a sandbox
	Params     json.RawMessage `json:"params,omitempty"` // see Redact
	Status     int             `json:"status,omitempty"` // of the answer
	Outcome    string          `json:"outcome"`          // "ok", or why not
	DurationMS float64         `json:"duration_ms"`      //
	Prev       string          `json:"prev"`             // SHA-256 of the line before, without its newline, in hex; of nothing for the first
}

// Options say how a record is kept.
type Options struct {
	FileBytes int64         // a file that has as many is followed by a new one; 0: 64 MiB
	Files     int           // so many are kept, the oldest are deleted; 0: all
	Sync      time.Duration // what was appended is on disk after so long at most; 0: one second, < 0: before Append returns
}

const (
	defaultFileBytes = 64 << 20
	defaultSync      = time.Second
	maxLine          = 1 << 20
	headFile         = "head"
)

// Log appends to a record. Its methods may be called at the same time.
type Log struct {
	dir string
	opt Options
	now func() time.Time

	mu     sync.Mutex
	file   *os.File
	bytes  int64
	head   head
	err    error // of what left the file in a state nobody knows: nothing is appended any more
	dirty  bool
	closed bool
	stop   chan struct{}
	synced sync.WaitGroup
}

// head is what the file of that name holds.
type head struct {
	First uint64 `json:"first"` // the oldest line that was not deleted with its file
	Seq   uint64 `json:"seq"`   // the last line; 0 for none
	Hash  string `json:"hash"`  // of the last line
}

// Open continues the record in a directory, which is made if it is missing. A line that an earlier process had begun when it was killed is cut
// off, and the record says so. It fails when another process has the record open, and when its end is not as the head says: a record that was
// tampered with is not continued.
func Open(dir string, opt Options) (_ *Log, err error) {
	if opt.FileBytes == 0 {
		opt.FileBytes = defaultFileBytes
	}
	if opt.Sync == 0 {
		opt.Sync = defaultSync
	}
	l := &Log{dir: dir, opt: opt, now: time.Now, stop: make(chan struct{})}
	defer func() {
		if err != nil {
			err = fmt.Errorf("audit record %s: %w", dir, err)
			if l.file != nil {
				_ = l.file.Close()
			}
		}
	}()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	torn, err := l.resume()
	if err != nil {
		return nil, err
	}
	if torn > 0 {
		params := json.RawMessage(fmt.Sprintf(`{"bytes":%d}`, torn))
		if err := l.Append(Entry{Principal: "forkd", Action: "audit.cut", Params: params, Outcome: "a line that was not finished was cut off"}); err != nil {
			return nil, err
		}
	}
	if l.opt.Sync > 0 {
		l.synced.Go(l.syncer)
	}
	return l, nil
}

// resume opens the newest file behind its last line.
func (l *Log) resume() (torn int64, err error) {
	l.head, err = readHead(l.dir)
	if err != nil {
		return 0, err
	}
	names, err := files(l.dir)
	if err != nil {
		return 0, err
	}
	if len(names) == 0 {
		if l.head.Seq > 0 {
			return 0, fmt.Errorf("its head says that there are lines up to %d, but there is no file: `forkd audit verify` says more", l.head.Seq)
		}
		return 0, l.startFile()
	}
	l.file, err = os.OpenFile(filepath.Join(l.dir, names[len(names)-1]), os.O_RDWR, 0)
	if err != nil {
		return 0, err
	}
	if err := lock(l.file); err != nil {
		return 0, err
	}
	return l.findEnd(names)
}

// findEnd cuts what is behind the last whole line and compares the end with the head, which may be some lines behind.
func (l *Log) findEnd(names []string) (torn int64, err error) {
	size, err := l.file.Seek(0, io.SeekEnd)
	if err != nil {
		return 0, err
	}
	end := l.head
	err = eachLine(io.NewSectionReader(l.file, 0, size), func(line []byte, at int64, whole bool) error {
		if !whole {
			torn = int64(len(line))
			return nil
		}
		var e Entry
		if err := json.Unmarshal(line, &e); err != nil {
			return fmt.Errorf("%s: the line at byte %d is damaged: %w", l.file.Name(), at, err)
		}
		end.Seq, end.Hash = e.Seq, hashOf(line)
		l.bytes = at + int64(len(line)) + 1
		if e.Seq == l.head.Seq && end.Hash != l.head.Hash {
			return fmt.Errorf("line %d is not the one that was written: `forkd audit verify` says more", e.Seq)
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	first, err := firstOf(names[0])
	if err != nil {
		return 0, err
	}
	switch {
	case l.bytes == 0 && len(names) > 1: // killed between the making of the file and its first line
		if n, _ := firstOf(names[len(names)-1]); n != l.head.Seq+1 {
			return 0, fmt.Errorf("its newest file begins at line %d, its head says that the last line is %d", n, l.head.Seq)
		}
	case end.Seq < l.head.Seq || l.bytes == 0 && l.head.Seq > 0:
		return 0, fmt.Errorf("lines %d to %d are missing at its end: `forkd audit verify` says more", end.Seq+1, l.head.Seq)
	}
	end.First = first
	l.head = end
	if torn > 0 {
		if err := l.file.Truncate(l.bytes); err != nil {
			return 0, err
		}
	}
	_, err = l.file.Seek(l.bytes, io.SeekStart)
	return torn, err
}

// startFile begins the file of the next line.
func (l *Log) startFile() error {
	name := filepath.Join(l.dir, fileName(l.head.Seq+1))
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	err = lock(f)
	if err == nil {
		err = syncDir(l.dir)
	}
	if err != nil { // it is tried again
		return errors.Join(err, f.Close(), os.Remove(name))
	}
	if l.file != nil { // rotate has brought it to disk
		_ = l.file.Close()
	}
	l.file, l.bytes = f, 0
	if l.head.First == 0 {
		l.head.First = 1
	}
	return nil
}

// Append adds a line. When it returns the line is in the file, and after Options.Sync on disk. After an error the line is not there, and a later
// one may be, when there is room again.
func (l *Log) Append(e Entry) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return errors.New("audit record: it is closed")
	}
	if l.err != nil {
		return l.err
	}
	if err := l.append(e); err != nil {
		return fmt.Errorf("audit record %s: line %d: %w", l.dir, l.head.Seq+1, err)
	}
	return nil
}

func (l *Log) append(e Entry) error {
	if l.bytes >= l.opt.FileBytes {
		if err := l.rotate(); err != nil {
			return err
		}
	}
	e.Seq, e.Prev = l.head.Seq+1, l.head.Hash
	if e.Prev == "" {
		e.Prev = hashOf(nil)
	}
	if e.Time.IsZero() {
		e.Time = l.now()
	}
	e.Time = e.Time.UTC()
	line, err := json.Marshal(e)
	if err == nil && len(line) > maxLine {
		e.Params = json.RawMessage(`{"too_large":true}`)
		line, err = json.Marshal(e)
	}
	if err != nil {
		return err
	}
	if _, err := l.file.Write(append(line, '\n')); err != nil {
		return errors.Join(err, l.cut())
	}
	l.bytes += int64(len(line)) + 1
	l.head.Seq, l.head.Hash = e.Seq, hashOf(line)
	l.dirty = true
	if l.opt.Sync < 0 {
		return l.syncLocked()
	}
	return nil
}

// cut takes back what was written of a line. When that can't be done either nothing more may be appended.
func (l *Log) cut() error {
	err := l.file.Truncate(l.bytes)
	if err == nil {
		_, err = l.file.Seek(l.bytes, io.SeekStart)
	}
	if err != nil {
		l.err = fmt.Errorf("audit record %s: half of line %d can't be taken back: %w", l.dir, l.head.Seq+1, err)
	}
	return err
}

// rotate begins a new file and deletes the oldest.
func (l *Log) rotate() error {
	if err := l.syncLocked(); err != nil {
		return err
	}
	if err := l.startFile(); err != nil {
		return err
	}
	if l.opt.Files <= 0 {
		return nil
	}
	names, err := files(l.dir)
	if err != nil {
		return err
	}
	if len(names) <= l.opt.Files {
		return nil
	}
	gone := names[:len(names)-l.opt.Files]
	if l.head.First, err = firstOf(names[len(gone)]); err != nil {
		return err
	}
	if err := writeHead(l.dir, l.head); err != nil { // first: a file that is still there is no harm
		return err
	}
	for _, name := range gone {
		if err := os.Remove(filepath.Join(l.dir, name)); err != nil {
			return err
		}
	}
	return nil
}

func (l *Log) syncer() {
	tick := time.NewTicker(l.opt.Sync)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			l.sync()
		case <-l.stop:
			return
		}
	}
}

// sync brings what was appended to disk, if it can. A head that could not be written, as on a full disk, is written when there is room again.
func (l *Log) sync() {
	l.mu.Lock()
	defer l.mu.Unlock()
	_ = l.syncLocked()
}

func (l *Log) syncLocked() error {
	if !l.dirty {
		return nil
	}
	if err := l.file.Sync(); err != nil { // for good: the kernel reports it once, and nobody knows what is on disk
		err = fmt.Errorf("audit record %s: %w", l.dir, err)
		if l.err == nil {
			l.err = err
		}
		return err
	}
	if err := writeHead(l.dir, l.head); err != nil {
		return err
	}
	l.dirty = false
	return nil
}

// Head is the digest of the last line, for keeping elsewhere.
func (l *Log) Head() (seq uint64, hash string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.head.Seq, l.head.Hash
}

// Close brings what was appended to disk. Closing twice is harmless.
func (l *Log) Close() error {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return nil
	}
	l.closed = true
	err := errors.Join(l.syncLocked(), l.file.Close())
	l.mu.Unlock()
	close(l.stop)
	l.synced.Wait()
	return err
}

// lock makes sure that a record has one writer.
func lock(f *os.File) error {
	err := filelock.Soon(f)
	if errors.Is(err, filelock.ErrHeld) {
		return errors.New("another process keeps it")
	}
	return err
}

const (
	filePrefix = "audit-"
	fileSuffix = ".jsonl"
)

func fileName(first uint64) string { return fmt.Sprintf("%s%020d%s", filePrefix, first, fileSuffix) }

// firstOf is the number of a file's first line.
func firstOf(name string) (first uint64, err error) {
	middle := strings.TrimSuffix(strings.TrimPrefix(name, filePrefix), fileSuffix)
	if _, err := fmt.Sscanf(middle, "%d", &first); err != nil || fileName(first) != name {
		return 0, fmt.Errorf("%s is not the name of a file of an audit record", name)
	}
	return first, nil
}

// files are the names of a record's files, oldest first.
func files(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), filePrefix) && strings.HasSuffix(e.Name(), fileSuffix) {
			names = append(names, e.Name())
		}
	}
	slices.Sort(names)
	return names, nil
}

func readHead(dir string) (h head, err error) {
	b, err := os.ReadFile(filepath.Join(dir, headFile))
	if errors.Is(err, fs.ErrNotExist) {
		return h, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &h)
	}
	if err != nil {
		return h, fmt.Errorf("head: %w", err)
	}
	return h, nil
}

func writeHead(dir string, h head) error {
	b, err := json.Marshal(h)
	if err != nil {
		return err
	}
	path := filepath.Join(dir, headFile)
	f, err := os.OpenFile(path+".new", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

func hashOf(line []byte) string {
	sum := sha256.Sum256(line)
	return hex.EncodeToString(sum[:])
}

// eachLine calls do with each line, where it begins, and whether it ends with a newline: only the last may not.
func eachLine(r io.Reader, do func(line []byte, at int64, whole bool) error) error {
	var pending []byte
	var at int64
	buf := make([]byte, 64<<10)
	for {
		n, err := r.Read(buf)
		pending = append(pending, buf[:n]...)
		for {
			i := bytes.IndexByte(pending, '\n')
			if i < 0 {
				break
			}
			if err := do(pending[:i], at, true); err != nil {
				return err
			}
			at, pending = at+int64(i)+1, pending[i+1:]
		}
		if len(pending) > 2*maxLine {
			return fmt.Errorf("the line at byte %d has more than %d bytes", at, 2*maxLine)
		}
		switch {
		case err == io.EOF && len(pending) > 0:
			return do(pending, at, false)
		case err == io.EOF:
			return nil
		case err != nil:
			return err
		}
	}
}
