package e2e

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"maps"
	"math/rand/v2"
	"slices"
)

//go:embed graph_area.py
var areaCode string

// areaPages is how many pages of memory are compared, as graph_area.py has it.
const areaPages = 2048

// content is what a guest must hold: which change last touched each page and each file, and all changes in order.
type content struct {
	pages [areaPages]string
	files map[string]writtenFile
	done  []string
}

type writtenFile struct {
	mark string
	size int
}

func (c content) clone() content {
	c.files, c.done = maps.Clone(c.files), slices.Clone(c.done)
	return c
}

// change is something that is done in a guest and in a model.
type change struct {
	mark  string
	runs  [][2]int
	files map[string]int // sizes; 0: the file is removed
}

// newChange makes one that touches pages here and there, single ones and long runs, and a few files.
func (c content) newChange(mark string, dice *rand.Rand) change {
	ch := change{mark: mark, files: map[string]int{}}
	for range 1 + dice.IntN(6) {
		n := 1 + dice.IntN(4)
		if dice.IntN(3) == 0 {
			n = 1 + dice.IntN(300)
		}
		first := dice.IntN(areaPages - n)
		ch.runs = append(ch.runs, [2]int{first, n})
	}
	for range 1 + dice.IntN(3) {
		name := fmt.Sprintf("f%d", dice.IntN(5))
		if _, there := c.files[name]; there && dice.IntN(3) == 0 {
			ch.files[name] = 0
		} else {
			ch.files[name] = 1 + dice.IntN(100_000)
		}
	}
	return ch
}

// code does the change in a guest.
func (ch change) code() string {
	runs, _ := json.Marshal(ch.runs) // numbers
	files, _ := json.Marshal(ch.files)
	return fmt.Sprintf("change(%q, %s, %s)", ch.mark, runs, files)
}

// apply does the change in the model.
func (c *content) apply(ch change) {
	for _, run := range ch.runs {
		for page := run[0]; page < run[0]+run[1]; page++ {
			c.pages[page] = ch.mark
		}
	}
	for name, size := range ch.files {
		if size == 0 {
			delete(c.files, name)
		} else {
			c.files[name] = writtenFile{ch.mark, size}
		}
	}
	c.done = append(c.done, ch.mark)
}

// filling is what a page or a file is filled with.
func filling(word string, size int) []byte {
	sum := sha256.Sum256([]byte(word))
	return bytes.Repeat(sum[:], size/len(sum)+1)[:size]
}

// compare says what is otherwise in a guest.
func (c content) compare(g *guest) error {
	var got struct {
		Pages []uint32          `json:"pages"`
		Files map[string]string `json:"files"`
		Done  []string          `json:"done"`
	}
	if err := g.tryPyJSON("found()", &got); err != nil {
		return err
	}
	var wrong []string
	if len(got.Pages) != areaPages {
		return fmt.Errorf("%d pages of memory, want %d", len(got.Pages), areaPages)
	}
	for page, mark := range c.pages {
		want := make([]byte, 4096)
		if mark != "" {
			want = filling(fmt.Sprintf("%s %d", mark, page), len(want))
		}
		if crc32.ChecksumIEEE(want) != got.Pages[page] {
			wrong = append(wrong, fmt.Sprintf("page %d is not as %q left it", page, mark))
		}
	}
	for name, file := range c.files {
		sum := sha256.Sum256(filling(file.mark+name, file.size))
		if got.Files[name] != hex.EncodeToString(sum[:]) {
			wrong = append(wrong, fmt.Sprintf("file %s is not as %q left it", name, file.mark))
		}
		delete(got.Files, name)
	}
	if len(got.Files) > 0 {
		wrong = append(wrong, fmt.Sprintf("there are files %v", slices.Sorted(maps.Keys(got.Files))))
	}
	if !slices.Equal(got.Done, c.done) {
		wrong = append(wrong, fmt.Sprintf("the interpreter knows of changes %v, want %v", got.Done, c.done))
	}
	if len(wrong) > 0 {
		return fmt.Errorf("%d differences: %w", len(wrong), errors.New(fmt.Sprint(wrong[:min(len(wrong), 5)])))
	}
	return nil
}
