package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/client"
)

// printJSON prints a result for programs.
func (p *program) printJSON(v any) error {
	enc := json.NewEncoder(p.stdout)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return fmt.Errorf("write the result: %w", err)
	}
	return nil
}

// table prints aligned columns. Nothing is printed for a table without rows but its heading.
func (p *program) table(heading []string, rows [][]string) error {
	w := tabwriter.NewWriter(p.stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, strings.Join(heading, "\t"))
	for _, row := range rows {
		cells := make([]string, len(row))
		for i, cell := range row {
			cells[i] = printable(cell)
		}
		fmt.Fprintln(w, strings.Join(cells, "\t"))
	}
	return w.Flush()
}

// printable shows what others chose (metadata, names, errors of guests) so that it can't steer a terminal, nor pass for a line or a column of ours.
func printable(s string) string {
	if strings.IndexFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) < 0 {
		return s
	}
	quoted := strconv.Quote(s)
	return quoted[1 : len(quoted)-1]
}

// printableLines is printable for texts that may have several lines.
func printableLines(s string) string {
	lines := strings.Split(s, "\n")
	for i, line := range lines {
		lines[i] = printable(strings.ReplaceAll(line, "\t", "    "))
	}
	return strings.Join(lines, "\n")
}

// facts prints one thing, a line for each of its properties.
func (p *program) facts(rows [][2]string) error {
	w := tabwriter.NewWriter(p.stdout, 0, 0, 2, ' ', 0)
	for _, row := range rows {
		if row[1] != "" {
			fmt.Fprintf(w, "%s\t%s\n", row[0], printable(row[1]))
		}
	}
	return w.Flush()
}

// lines prints one word a line, for -q.
func (p *program) lines(words []string) error {
	for _, word := range words {
		if _, err := fmt.Fprintln(p.stdout, word); err != nil {
			return fmt.Errorf("write the result: %w", err)
		}
	}
	return nil
}

// say tells people on stderr what went on.
func (p *program) say(format string, args ...any) {
	if !p.cli.JSON {
		fmt.Fprintln(p.stderr, printableLines(fmt.Sprintf(format, args...)))
	}
}

// size shows bytes with a unit.
func size(bytes int64) string {
	const units = "KMGT"
	if bytes < 1<<10 {
		return fmt.Sprintf("%d B", bytes)
	}
	v, i := float64(bytes)/1024, 0
	for v >= 1024 && i < len(units)-1 {
		v, i = v/1024, i+1
	}
	return fmt.Sprintf("%.1f %ciB", v, units[i])
}

// millis shows a duration that is given in milliseconds.
func millis(ms float64) string { return span(time.Duration(ms * float64(time.Millisecond))) }

// span shows a duration in its largest sensible unit.
func span(d time.Duration) string {
	switch {
	case d < 0:
		return "-" + span(-d)
	case d < time.Second:
		return fmt.Sprintf("%.1f ms", float64(d)/float64(time.Millisecond))
	case d < time.Minute:
		return fmt.Sprintf("%.1f s", d.Seconds())
	case d < time.Hour:
		return fmt.Sprintf("%d min", d/time.Minute)
	case d < 48*time.Hour:
		return fmt.Sprintf("%d h", d/time.Hour)
	default:
		return fmt.Sprintf("%d d", d/(24*time.Hour))
	}
}

// ago is how long a moment is past.
func ago(unixSecs int64) string {
	return span(time.Since(time.Unix(unixSecs, 0)).Truncate(time.Second)) + " ago"
}

// until is how far off a deadline is.
func until(unixSecs *int64) string {
	if unixSecs == nil {
		return "-"
	}
	left := time.Until(time.Unix(*unixSecs, 0)).Truncate(time.Second)
	if left < time.Second {
		return "now"
	}
	return "in " + span(left)
}

// progress shows the steps of long work on stderr: on a terminal one line that changes, else a line for each step.
type progress struct {
	out      io.Writer
	terminal bool
	last     string
	shown    bool
}

func (p *program) progress() *progress {
	if p.cli.JSON {
		return &progress{out: io.Discard}
	}
	return &progress{out: p.stderr, terminal: isTerminal(p.stderr)}
}

func (g *progress) report(e client.Progress) {
	line := strings.ReplaceAll(e.Step, "_", " ")
	if e.Detail != "" {
		line += ": " + e.Detail
	}
	if g.terminal {
		if e.Total > 0 {
			line += fmt.Sprintf(" (%d %%)", e.Done*100/e.Total)
		}
		fmt.Fprintf(g.out, "\r\x1b[K%.120s", strings.ReplaceAll(line, "\n", " "))
		g.shown = true
		return
	}
	if line != g.last { // only the counter moved: that is for terminals
		fmt.Fprintln(g.out, line)
		g.last = line
	}
}

// end clears the line on a terminal.
func (g *progress) end() {
	if g.shown {
		fmt.Fprint(g.out, "\r\x1b[K")
	}
}

// isTerminal tells whether w is a terminal.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
