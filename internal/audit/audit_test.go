package audit

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestMain has the test binary append without end when it is asked to, so that a test can kill it.
func TestMain(m *testing.M) {
	if dir := os.Getenv("AUDIT_TEST_APPEND"); dir != "" {
		l, err := Open(dir, Options{FileBytes: 20_000, Sync: time.Millisecond})
		for err == nil {
			err = l.Append(Entry{Principal: "p", Action: "a", Outcome: strings.Repeat("x", 200)})
		}
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func open(t *testing.T, dir string, opt Options) *Log {
	t.Helper()
	l, err := Open(dir, opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func fill(t *testing.T, l *Log, n int) {
	t.Helper()
	for i := range n {
		if err := l.Append(Entry{Principal: "uid 0", Action: "POST /v1/sandboxes", Target: fmt.Sprint("sb", i), Outcome: "ok"}); err != nil {
			t.Fatal(err)
		}
	}
}

func verify(t *testing.T, dir string, opt VerifyOptions) Report {
	t.Helper()
	r, err := Verify(dir, opt)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func sound(t *testing.T, dir string, lines uint64) Report {
	t.Helper()
	r := verify(t, dir, VerifyOptions{})
	if len(r.Problems) > 0 || r.Lines != lines {
		t.Errorf("got %d lines, problems %v, want %d and none", r.Lines, r.Problems, lines)
	}
	return r
}

func TestChainGoesOnFromFileToFileAndRunToRun(t *testing.T) {
	dir := t.TempDir()
	for run := range 3 {
		l := open(t, dir, Options{FileBytes: 1000})
		fill(t, l, 20)
		sound(t, dir, uint64(run+1)*20) // in use
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
	r := sound(t, dir, 60)
	if r.Files < 3 || r.First != 1 || r.Last != 60 {
		t.Errorf("got %+v", r)
	}
}

func TestOldFilesGo(t *testing.T) {
	dir := t.TempDir()
	l := open(t, dir, Options{FileBytes: 1000, Files: 2})
	fill(t, l, 50)
	r := verify(t, dir, VerifyOptions{})
	if r.Files != 2 || r.First == 1 || r.Last != 50 || len(r.Problems) > 0 {
		t.Errorf("got %+v", r)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	fill(t, open(t, dir, Options{FileBytes: 1000, Files: 2}), 1)
}

func TestManyAppendAtOnce(t *testing.T) {
	dir := t.TempDir()
	l := open(t, dir, Options{FileBytes: 5000})
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 50 {
				if err := l.Append(Entry{Action: "a"}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	sound(t, dir, 400)
}

// Whatever is done to the lines must be found.
func TestVerifyFindsTampering(t *testing.T) {
	const lines = 30
	tests := map[string]func(all [][]byte) [][]byte{
		"a character changed": func(all [][]byte) [][]byte {
			all[7] = bytes.Replace(all[7], []byte("sb7"), []byte("sb8"), 1)
			return all
		},
		"the first line changed": func(all [][]byte) [][]byte {
			all[0] = bytes.Replace(all[0], []byte("uid 0"), []byte("uid 1"), 1)
			return all
		},
		"the last line changed": func(all [][]byte) [][]byte {
			all[lines-1] = bytes.Replace(all[lines-1], []byte("uid 0"), []byte("uid 1"), 1)
			return all
		},
		"a line dropped":            func(all [][]byte) [][]byte { return slices.Delete(all, 11, 12) },
		"the first line dropped":    func(all [][]byte) [][]byte { return all[1:] },
		"the last line dropped":     func(all [][]byte) [][]byte { return all[:lines-1] },
		"half of the lines dropped": func(all [][]byte) [][]byte { return all[:lines/2] },
		"lines exchanged": func(all [][]byte) [][]byte {
			all[3], all[4] = all[4], all[3]
			return all
		},
		"a line twice": func(all [][]byte) [][]byte { return slices.Insert(all, 5, all[5]) },
		"a line forged at the end": func(all [][]byte) [][]byte {
			return append(all, []byte(`{"seq":31,"action":"nothing","prev":"00"}`))
		},
		"renumbered after a drop": func(all [][]byte) [][]byte {
			all = slices.Delete(all, 11, 12)
			for i := 11; i < len(all); i++ {
				var e Entry
				if err := json.Unmarshal(all[i], &e); err != nil {
					panic(err)
				}
				e.Seq = uint64(i + 1)
				all[i], _ = json.Marshal(e)
			}
			return all
		},
		"no JSON": func(all [][]byte) [][]byte {
			all[9] = []byte("hello")
			return all
		},
	}
	for name, tamper := range tests {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			l := open(t, dir, Options{})
			fill(t, l, lines)
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
			sound(t, dir, lines)
			path := filepath.Join(dir, fileName(1))
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			all := tamper(bytes.Split(bytes.TrimSuffix(b, []byte("\n")), []byte("\n")))
			if err := os.WriteFile(path, append(bytes.Join(all, []byte("\n")), '\n'), 0o600); err != nil {
				t.Fatal(err)
			}
			if r := verify(t, dir, VerifyOptions{}); len(r.Problems) == 0 {
				t.Errorf("nothing was found: %+v", r)
			}
		})
	}
}

func TestVerifyFindsAMissingFile(t *testing.T) {
	for _, which := range []int{0, 1, -1} {
		dir := t.TempDir()
		l := open(t, dir, Options{FileBytes: 1000})
		fill(t, l, 40)
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		names, err := files(dir)
		if err != nil || len(names) < 4 {
			t.Fatal(names, err)
		}
		gone := names[(which+len(names))%len(names)]
		if err := os.Remove(filepath.Join(dir, gone)); err != nil {
			t.Fatal(err)
		}
		if r := verify(t, dir, VerifyOptions{}); len(r.Problems) == 0 {
			t.Errorf("without %s: nothing was found: %+v", gone, r)
		}
	}
}

// Who makes the record anew is found by a digest that was kept elsewhere.
func TestVerifyAgainstAHeadKeptElsewhere(t *testing.T) {
	dir := t.TempDir()
	l := open(t, dir, Options{})
	fill(t, l, 3)
	_, noted := l.Head()
	fill(t, l, 3)
	if r := verify(t, dir, VerifyOptions{Head: noted}); len(r.Problems) > 0 {
		t.Errorf("problems %v, want none", r.Problems)
	}
	other := t.TempDir()
	fill(t, open(t, other, Options{}), 6)
	if r := verify(t, other, VerifyOptions{Head: noted}); len(r.Problems) != 1 {
		t.Errorf("problems %v of another record, want one", r.Problems)
	}
}

func TestHalfALineIsCutAndSaid(t *testing.T) {
	dir := t.TempDir()
	l := open(t, dir, Options{})
	fill(t, l, 3)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(filepath.Join(dir, fileName(1)), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString(`{"seq":4,"ti`); err != nil {
		t.Fatal(err)
	}
	f.Close()
	sound(t, dir, 3)
	fill(t, open(t, dir, Options{}), 1)
	sound(t, dir, 5)
	b, _ := os.ReadFile(filepath.Join(dir, fileName(1)))
	if !bytes.Contains(b, []byte(`"params":{"bytes":12}`)) {
		t.Errorf("the record does not say that a line was cut off: %s", b)
	}
}

func TestOpenRefuses(t *testing.T) {
	tests := map[string]struct {
		do   func(t *testing.T, dir string)
		want string
	}{
		"a second writer": {func(t *testing.T, dir string) { open(t, dir, Options{}) }, "another process keeps it"},
		"a short record": {func(t *testing.T, dir string) {
			path := filepath.Join(dir, fileName(1))
			b, _ := os.ReadFile(path)
			os.WriteFile(path, b[:bytes.IndexByte(b, '\n')+1], 0o600)
		}, "lines 2 to 3 are missing at its end"},
		"no file": {func(t *testing.T, dir string) { os.Remove(filepath.Join(dir, fileName(1))) }, "there is no file"},
		"another last line": {func(t *testing.T, dir string) {
			path := filepath.Join(dir, fileName(1))
			b, _ := os.ReadFile(path)
			os.WriteFile(path, bytes.ReplaceAll(b, []byte("sb2"), []byte("sb9")), 0o600)
		}, "line 3 is not the one that was written"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			l := open(t, dir, Options{})
			fill(t, l, 3)
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
			tt.do(t, dir)
			if l, err := Open(dir, Options{}); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("Open() error = %v, want one with %q", err, tt.want)
				if err == nil {
					l.Close()
				}
			}
		})
	}
}

// A process that is killed while it appends loses nothing that it had appended, and the next one goes on.
func TestKilledWhileAppending(t *testing.T) {
	dir := t.TempDir()
	for range 8 {
		before := verify(t, dir, VerifyOptions{}).Lines
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), "AUDIT_TEST_APPEND="+dir)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		for deadline := time.Now().Add(20 * time.Second); verify(t, dir, VerifyOptions{}).Lines < before+200; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal("nothing was appended")
			}
		}
		cmd.Process.Kill()
		cmd.Wait()
		if r := verify(t, dir, VerifyOptions{}); len(r.Problems) > 0 {
			t.Fatalf("after a kill: %+v", r)
		}
	}
}

func TestRedact(t *testing.T) {
	long := strings.Repeat("ä", 400)
	tests := map[string]struct{ body, want string }{
		"kept":        {`{"snapshot_tag":"py","n":3,"args":["ls","-l"]}`, `{"args":["ls","-l"],"n":3,"snapshot_tag":"py"}`},
		"environment": {`{"env":{"KEY":"hunter2"}}`, `{"env":{"KEY":"…"}}`},
		"secrets":     {`{"secrets":["hunter2"],"token":"hunter2"}`, `{"secrets":"…","token":"…"}`},
		"within":      {`{"children":[{"env":{"A":"hunter2"}}]}`, `{"children":[{"env":{"A":"…"}}]}`},
		"stdin":       {`{"stdin":"aHVudGVyMg=="}`, `{"stdin":"12 bytes"}`},
		"long":        {`{"code":"` + long + `"}`, `{"code":"` + long[:512] + `… (800 bytes)"}`},
		"deep":        {`{"a":{"b":{"c":{"d":{"e":1}}}}}`, `{"a":{"b":{"c":{"d":"…"}}}}`},
		"no object":   {`[1]`, ``},
		"no JSON":     {`{`, ``},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if got := Redact([]byte(tt.body)); string(got) != tt.want {
				t.Errorf("Redact(%s) = %s, want %s", tt.body, got, tt.want)
			}
		})
	}
}

// TestHeadThatCanNotBeWritten: when the head can't be written, as on a full disk, the record goes on, and the head follows when it can.
func TestHeadThatCanNotBeWritten(t *testing.T) {
	dir := t.TempDir()
	l := open(t, dir, Options{Sync: time.Hour})
	inTheWay := filepath.Join(dir, headFile+".new")
	if err := os.Mkdir(inTheWay, 0o700); err != nil {
		t.Fatal(err)
	}
	fill(t, l, 1)
	l.sync()
	if h, err := readHead(dir); err != nil || h.Seq != 0 {
		t.Fatalf("head %+v, %v, want none yet", h, err)
	}
	fill(t, l, 1)
	if err := os.Remove(inTheWay); err != nil {
		t.Fatal(err)
	}
	l.sync()
	if h, err := readHead(dir); err != nil || h.Seq != 2 {
		t.Errorf("head %+v, %v, want line 2", h, err)
	}
	fill(t, l, 1)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	sound(t, dir, 3)
}

// TestFailedSyncIsFinal: what the kernel could not write is not known, and nothing is appended to it.
func TestFailedSyncIsFinal(t *testing.T) {
	l := open(t, t.TempDir(), Options{Sync: time.Hour})
	fill(t, l, 1)
	if err := l.file.Close(); err != nil { // so that it can't be synced
		t.Fatal(err)
	}
	l.sync()
	if l.err == nil {
		t.Error("a record that could not be brought to disk goes on")
	}
}
