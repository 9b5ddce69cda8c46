package agent

import "golang.org/x/sys/unix"

// keepDraining takes over a pipe that something in the background still writes to, such as a server that was started with &: it would
// be killed by SIGPIPE at its next line of output if the pipe were closed, and hang if it were left full.
func (a *Agent) keepDraining(c *capture) {
	fd := c.fd
	c.fd = -1
	if fd < 0 {
		return
	}
	if a.stop >= 0 {
		// Nobody may wait for a stranger's background process.
		unix.Close(fd)
		return
	}
	go func() { // ends with the last writer
		_ = unix.SetNonblock(fd, false)
		var sink [512]byte
		for {
			n, err := unix.Read(fd, sink[:])
			if err != unix.EINTR && (err != nil || n <= 0) {
				unix.Close(fd)
				return
			}
		}
	}()
}
