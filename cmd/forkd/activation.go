package main

import (
	"fmt"
	"net"
	"os"
	"strconv"
)

// firstPassed is the number of the first descriptor that systemd passes (sd_listen_fds(3)).
const firstPassed = 3

// passedListener is the Unix socket that systemd listens on for us, where there is one; nil where there is none.
func passedListener(getenv func(string) string) (net.Listener, error) {
	if pid, err := strconv.Atoi(getenv("LISTEN_PID")); err != nil || pid != os.Getpid() {
		return nil, nil
	}
	n, err := strconv.Atoi(getenv("LISTEN_FDS"))
	if err != nil || n < 1 {
		return nil, nil
	}
	if n > 1 {
		return nil, fmt.Errorf("systemd passes %d sockets: give forkd.socket one ListenStream, a Unix socket", n)
	}
	f := os.NewFile(firstPassed, "socket of systemd")
	l, err := net.FileListener(f)
	_ = f.Close()
	if err != nil {
		return nil, fmt.Errorf("socket that systemd passes: %w", err)
	}
	if _, ok := l.(*net.UnixListener); !ok {
		_ = l.Close()
		return nil, fmt.Errorf("socket that systemd passes: %s is none of the Unix family: give TCP with --listen", l.Addr())
	}
	return l, nil
}
