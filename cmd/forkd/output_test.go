package main

import (
	"bytes"
	"testing"
	"time"

	"github.com/forkd/forkd/client"
)

func TestSize(t *testing.T) {
	t.Parallel()
	for in, want := range map[int64]string{0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1536: "1.5 KiB", 256 << 20: "256.0 MiB", 3 << 30: "3.0 GiB", 5 << 50: "5120.0 TiB"} {
		if got := size(in); got != want {
			t.Errorf("size(%d) = %q, want %q", in, got, want)
		}
	}
}

func TestSpan(t *testing.T) {
	t.Parallel()
	tests := map[time.Duration]string{
		0: "0.0 ms", 1234 * time.Microsecond: "1.2 ms", 1500 * time.Millisecond: "1.5 s", 90 * time.Second: "1 min", 3 * time.Hour: "3 h",
		72 * time.Hour: "3 d", -time.Second: "-1.0 s",
	}
	for in, want := range tests {
		if got := span(in); got != want {
			t.Errorf("span(%v) = %q, want %q", in, got, want)
		}
	}
}

func TestProgress(t *testing.T) {
	t.Parallel()
	events := []client.Progress{
		{Step: "boot"}, {Step: "copy", Detail: "a\nb", Done: 1, Total: 4}, {Step: "copy", Detail: "a\nb", Done: 2, Total: 4}, {Step: "warm_up", Detail: "import x"},
	}
	tests := []struct {
		name     string
		terminal bool
		want     string
	}{
		{"plain lines", false, "boot\ncopy: a\nb\nwarm up: import x\n"},
		{"terminal", true, "\r\x1b[Kboot\r\x1b[Kcopy: a b (25 %)\r\x1b[Kcopy: a b (50 %)\r\x1b[Kwarm up: import x\r\x1b[K"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			var out bytes.Buffer
			g := &progress{out: &out, terminal: tt.terminal}
			for _, e := range events {
				g.report(e)
			}
			g.end()
			if got := out.String(); got != tt.want {
				t.Errorf("shown = %q, want %q", got, tt.want)
			}
		})
	}
}

func TestDefaultDirectories(t *testing.T) {
	t.Parallel()
	f := daemonFlags{Data: "rel", RunDir: "/run/x", Cache: "/c"}
	if err := f.fillDefaults(func(string) string { return "" }); err != nil {
		t.Fatal(err)
	}
	if f.Data[0] != '/' || f.RunDir != "/run/x" || f.Cache != "/c" {
		t.Errorf("directories = %q %q %q, want absolute ones, and those that were given", f.Data, f.RunDir, f.Cache)
	}
}

func TestPrintable(t *testing.T) {
	tests := map[string]struct{ text, cell, lines string }{
		"plain":      {"zoë 3 × └─ x", "zoë 3 × └─ x", "zoë 3 × └─ x"},
		"escape":     {"\x1b]0;pwned\a", `\x1b]0;pwned\a`, `\x1b]0;pwned\a`},
		"line":       {"a\npid  1", `a\npid  1`, "a\npid  1"},
		"column":     {"a\tb", `a\tb`, "a    b"},
		"return":     {"a\rb", `a\rb`, `a\rb`},
		"override":   {"a\u202eb", `a\u202eb`, `a\u202eb`},
		"not UTF-8":  {"a\xff\x1bb", `a\xff\x1bb`, `a\xff\x1bb`},
		"with quote": {"a\"\x00", `a\"\x00`, `a\"\x00`},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if got := printable(tt.text); got != tt.cell {
				t.Errorf("printable(%q) = %q, want %q", tt.text, got, tt.cell)
			}
			if got := printableLines(tt.text); got != tt.lines {
				t.Errorf("printableLines(%q) = %q, want %q", tt.text, got, tt.lines)
			}
		})
	}
}
