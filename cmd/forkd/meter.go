package main

import (
	"io"
	"time"

	"github.com/forkd/forkd/client"
)

// meter counts what is read, and shows it on a terminal as it goes.
type meter struct {
	in    io.Reader
	steps *progress
	what  string
	total int64 // 0: not known
	count int64
	last  time.Time
}

// meter counts what is read from in for something that is being done.
func (p *program) meter(in io.Reader, what string, total int64) *meter {
	return &meter{in: in, steps: p.progress(), what: what, total: total}
}

// meterEvery is how often somebody who watches wants to see a number.
const meterEvery = 100 * time.Millisecond

// Read implements io.Reader.
func (m *meter) Read(b []byte) (int, error) {
	n, err := m.in.Read(b)
	m.count += int64(n)
	if now := time.Now(); m.steps.terminal && now.Sub(m.last) >= meterEvery {
		m.last = now
		m.steps.report(client.Progress{Step: m.what, Detail: size(m.count), Done: m.count, Total: m.total})
	}
	return n, err
}

// end clears the line on a terminal.
func (m *meter) end() { m.steps.end() }
