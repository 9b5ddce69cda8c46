package audit

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
)

// VerifyOptions say what else is known of a record.
type VerifyOptions struct {
	Head string // the digest of a line that was noted elsewhere: it must be there; "": none
}

// Report is what Verify found.
type Report struct {
	Files    int       `json:"files"`
	Lines    uint64    `json:"lines"`
	First    uint64    `json:"first"` // number of the first line that is there
	Last     uint64    `json:"last"`
	Head     string    `json:"head"` // digest of the last line
	Problems []Problem `json:"problems"`
}

// Problem is something that is not as it was written.
type Problem struct {
	File string `json:"file"`
	Line int    `json:"line"` // in the file, from 1; 0: the file as a whole
	What string `json:"what"`
}

// verifier walks along the chain.
type verifier struct {
	r     Report
	h     head
	prev  string // digest of the line before; "": it is not known
	want  string // VerifyOptions.Head
	found bool
	file  string
}

// maxProblems is how many are listed: after the first the others are mostly its consequences.
const maxProblems = 100

// Verify checks that every line of a record is there, in its order and as it was written. The record may be in use. An error means that it
// could not be read; what is wrong with it is in the report.
func Verify(dir string, opt VerifyOptions) (Report, error) {
	h, err := readHead(dir)
	if err != nil {
		return Report{}, fmt.Errorf("verify audit record %s: %w", dir, err)
	}
	names, err := files(dir)
	if err != nil {
		return Report{}, fmt.Errorf("verify audit record %s: %w", dir, err)
	}
	v := &verifier{h: h, want: opt.Head}
	for i, name := range names {
		if err := v.verifyFile(dir, name, i == len(names)-1); err != nil {
			return v.r, fmt.Errorf("verify audit record %s: %w", dir, err)
		}
	}
	v.file = headFile
	if v.r.Last < h.Seq {
		v.problem(0, "lines %d to %d are missing at the end", v.r.Last+1, h.Seq)
	}
	if h.First > 0 && v.r.First > h.First {
		v.problem(0, "lines %d to %d are missing at the beginning", h.First, v.r.First-1)
	}
	if v.want != "" && !v.found {
		v.problem(0, "no line has the digest %s", v.want)
	}
	return v.r, nil
}

func (v *verifier) problem(line int, format string, args ...any) {
	if len(v.r.Problems) < maxProblems {
		v.r.Problems = append(v.r.Problems, Problem{v.file, line, fmt.Sprintf(format, args...)})
	}
}

func (v *verifier) verifyFile(dir, name string, newest bool) error {
	v.file = name
	first, err := firstOf(name)
	if err != nil {
		v.problem(0, "%v", err)
		return nil
	}
	f, err := os.Open(filepath.Join(dir, name))
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	v.r.Files++
	if v.r.Files == 1 {
		v.r.First, v.r.Last = first, first-1
		if first == 1 {
			v.prev = hashOf(nil)
		}
	}
	n := 0
	err = eachLine(f, func(line []byte, _ int64, whole bool) error {
		n++
		if whole {
			v.verifyLine(n, line)
		} else if !newest {
			v.problem(n, "the line is not finished")
		}
		return nil
	})
	if err == nil && n == 0 && !newest {
		v.problem(0, "the file is empty")
	}
	return err
}

func (v *verifier) verifyLine(n int, line []byte) {
	var e Entry
	if err := json.Unmarshal(line, &e); err != nil {
		v.problem(n, "it is not a line of an audit record: %v", err)
		v.r.Last++ // most likely it was the next one
		v.prev = hashOf(line)
		return
	}
	if e.Seq != v.r.Last+1 {
		v.problem(n, "it has the number %d, line %d should be here", e.Seq, v.r.Last+1)
	}
	if v.prev != "" && e.Prev != v.prev {
		v.problem(n, "line %d does not follow the line before it: that was changed, or lines are missing between", e.Seq)
	}
	hash := hashOf(line)
	if e.Seq == v.h.Seq && hash != v.h.Hash {
		v.problem(n, "line %d is not the one that was written last", e.Seq)
	}
	v.r.Lines++
	v.found = v.found || hash == v.want
	v.r.Last, v.r.Head, v.prev = e.Seq, hash, hash
}
