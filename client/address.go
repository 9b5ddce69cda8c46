package client

import (
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
)

// DefaultSocket is where a daemon that runs as root listens.
const DefaultSocket = "/run/forkd/forkd.sock"

// address is where a daemon is expected.
type address struct {
	socket string // path of a Unix socket, or ""
	base   string // what requests' URLs begin with
}

// String is the address as FORKD_URL takes it.
func (a address) String() string {
	if a.socket != "" {
		return "unix://" + a.socket
	}
	return a.base
}

// parseAddress reads an http or https URL, unix:///path, or the path of a socket.
func parseAddress(s string) (address, error) {
	if strings.HasPrefix(s, "/") {
		s = "unix://" + s
	}
	u, err := url.Parse(s)
	if err != nil {
		return address{}, fmt.Errorf("daemon address %q: %w", s, err)
	}
	switch {
	case u.Scheme == "unix" && u.Host == "" && u.Path != "":
		return address{socket: u.Path, base: "http://forkd"}, nil
	case (u.Scheme == "http" || u.Scheme == "https") && u.Host != "":
		return address{base: strings.TrimRight(u.Scheme+"://"+u.Host+u.Path, "/")}, nil
	}
	return address{}, fmt.Errorf("daemon address %q: use http://host:port, unix:///path or /path of a socket", s)
}

// SocketPath is where this user's daemon listens unless told otherwise: DefaultSocket for root, else below XDG_RUNTIME_DIR.
func SocketPath(getenv func(string) string) string {
	runtime := getenv("XDG_RUNTIME_DIR")
	if os.Geteuid() == 0 || runtime == "" {
		return DefaultSocket
	}
	return filepath.Join(runtime, "forkd", "forkd.sock")
}

// findSocket is the socket of this user's daemon, or of root's when only that is there.
func findSocket(getenv func(string) string) string {
	own := SocketPath(getenv)
	if _, err := os.Stat(own); err == nil {
		return own
	}
	if _, err := os.Stat(DefaultSocket); err == nil {
		return DefaultSocket
	}
	return own
}
