package agent

import (
	"golang.org/x/sys/unix"

	"github.com/forkd/forkd/internal/guest/agentproto"
)

// capture keeps the first bytes of a pipe and swallows the rest.
type capture struct {
	fd        int // -1 once the pipe has ended
	limit     int
	data      []byte
	truncated bool
}

// drain reads what the pipe holds now. The descriptor does not block.
func (c *capture) drain() {
	var sink [4096]byte
	// Bounded: a writer that never stops must not keep the caller here.
	for budget := c.limit + 1<<20; c.fd >= 0 && budget > 0; {
		dst := sink[:]
		if room := c.limit - len(c.data); room > 0 {
			if cap(c.data) == len(c.data) {
				c.data = append(make([]byte, 0, min(max(4096, 2*cap(c.data)), c.limit)), c.data...)
			}
			dst = c.data[len(c.data):cap(c.data)]
		}
		n, err := unix.Read(c.fd, dst)
		if err == unix.EINTR {
			continue
		}
		if err == unix.EAGAIN {
			return
		}
		if err != nil || n <= 0 {
			c.close()
			return
		}
		budget -= n
		if len(c.data) < c.limit {
			c.data = c.data[:len(c.data)+n]
		} else {
			c.truncated = true
		}
	}
}

func (c *capture) close() {
	if c.fd >= 0 {
		unix.Close(c.fd)
		c.fd = -1
	}
}

// take returns what was kept and begins anew with another limit.
func (c *capture) take(limit int) (data []byte, truncated bool) {
	data, truncated = c.data, c.truncated
	c.data, c.truncated, c.limit = nil, false, limit
	return data, truncated
}

// outputLimit is the number of bytes to keep of each stream.
func outputLimit(asked uint32) int {
	if asked == 0 {
		return agentproto.DefaultMaxOutput
	}
	return int(min(asked, agentproto.LimitMaxOutput))
}
