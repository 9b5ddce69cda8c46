// Command testsum reads the output of `go test -json` and prints what a person wants of it: one line a package, the output of
// what failed, and at the end each skipped test with its reason. A test that is skipped in one run and passes in a later one was not
// skipped. It exits with 1 when something failed.
//
// It runs no test itself, and it is no part of the product.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"sort"
	"strings"
)

func main() {
	failed, err := summarise(os.Stdin, os.Stdout)
	if err != nil {
		fmt.Fprintln(os.Stderr, "testsum:", err)
	}
	if failed || err != nil {
		os.Exit(1)
	}
}

// event is a line of `go test -json` (see `go doc test2json`), those of failed builds included.
type event struct {
	Action, Package, Test, Output, ImportPath string
	Elapsed                                   float64
}

// name of the thing an event is about: a build, a package, or a test in it.
type name struct{ pkg, test string }

type summary struct {
	out     io.Writer
	output  map[name]*strings.Builder // kept until the thing has passed
	counts  map[string]int            // passed tests a package
	skipped map[name]string           // why; one that is run later is not in it
	failed  bool
}

func summarise(r io.Reader, w io.Writer) (failed bool, err error) {
	s := &summary{out: w, output: map[name]*strings.Builder{}, counts: map[string]int{}, skipped: map[name]string{}}
	lines := bufio.NewReader(r)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			s.line(line)
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			return true, fmt.Errorf("read test output: %w", err)
		}
	}
	if len(s.skipped) > 0 {
		var lines []string
		for n, why := range s.skipped {
			lines = append(lines, fmt.Sprintf("  %s %s: %s", n.pkg, n.test, why))
		}
		sort.Strings(lines)
		fmt.Fprintf(w, "\nskipped (%d):\n%s\n", len(lines), strings.Join(lines, "\n"))
	}
	return s.failed, nil
}

func (s *summary) line(line []byte) {
	var e event
	if json.Unmarshal(line, &e) != nil {
		s.out.Write(line) // not ours: go's own messages
		return
	}
	if e.Package == "" {
		e.Package = e.ImportPath
	}
	n := name{e.Package, e.Test}
	switch e.Action {
	case "output", "build-output":
		if s.output[n] == nil {
			s.output[n] = &strings.Builder{}
		}
		s.output[n].WriteString(e.Output)
	case "pass":
		s.pass(e)
		delete(s.output, n)
	case "skip":
		s.skip(e, n)
		delete(s.output, n)
	case "fail", "build-fail":
		s.fail(e, n)
		delete(s.output, n)
	}
}

func (s *summary) pass(e event) {
	if e.Test != "" {
		s.counts[e.Package]++
		delete(s.skipped, name{e.Package, e.Test})
		return
	}
	fmt.Fprintf(s.out, "ok    %s  %d tests, %.1f s\n", e.Package, s.counts[e.Package], e.Elapsed)
	delete(s.counts, e.Package)
}

func (s *summary) skip(e event, n name) {
	if e.Test == "" {
		return // a package without tests
	}
	s.skipped[n] = reason(s.output[n])
}

func (s *summary) fail(e event, n name) {
	s.failed = true
	delete(s.skipped, n)
	fmt.Fprintf(s.out, "FAIL  %s %s\n", e.Package, e.Test)
	if b := s.output[n]; b != nil {
		fmt.Fprint(s.out, indent(b.String()))
	}
	if e.Test != "" || e.Action == "build-fail" {
		return
	}
	// A package that ended in a test (a panic, its time limit) leaves that test without a verdict.
	for m, b := range s.output {
		if m.pkg == e.Package && m.test != "" {
			fmt.Fprintf(s.out, "FAIL  %s %s (did not end)\n%s", m.pkg, m.test, indent(b.String()))
			delete(s.output, m)
		}
	}
}

// reason is what the test said before it skipped: the lines that are not go's own.
func reason(b *strings.Builder) string {
	if b == nil {
		return "no reason given"
	}
	var said []string
	for _, l := range strings.Split(b.String(), "\n") {
		l = strings.TrimSpace(l)
		if l == "" || strings.HasPrefix(l, "=== ") || strings.HasPrefix(l, "--- ") {
			continue
		}
		if file, text, ok := strings.Cut(l, ": "); ok && strings.Contains(file, ".go:") {
			l = text
		}
		said = append(said, l)
	}
	if len(said) == 0 {
		return "no reason given"
	}
	return strings.Join(said, " ")
}

func indent(s string) string {
	s = strings.TrimRight(s, "\n")
	return "      " + strings.ReplaceAll(s, "\n", "\n      ") + "\n"
}
