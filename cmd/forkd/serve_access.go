package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/forkd/forkd/internal/keys"
	"github.com/forkd/forkd/internal/server"
)

// socketAccess is who else than root and this user may use the socket.
func (c *serveCmd) socketAccess() (server.SocketAccess, error) {
	if c.SocketGroup == "" {
		return server.SocketAccess{}, nil
	}
	gid, err := strconv.Atoi(c.SocketGroup)
	if err != nil {
		g, err := user.LookupGroup(c.SocketGroup)
		if err != nil {
			return server.SocketAccess{}, fmt.Errorf("--socket-group: %w", err)
		}
		if gid, err = strconv.Atoi(g.Gid); err != nil {
			return server.SocketAccess{}, fmt.Errorf("--socket-group %s: its id is %q", c.SocketGroup, g.Gid)
		}
	}
	if gid < 0 {
		return server.SocketAccess{}, fmt.Errorf("--socket-group %s: there is no such group", c.SocketGroup)
	}
	socket, err := filepath.Abs(c.Socket)
	if err != nil {
		return server.SocketAccess{}, fmt.Errorf("--socket: %w", err)
	}
	if strings.HasPrefix(socket, c.RunDir+"/") {
		return server.SocketAccess{}, &codedError{code: exitUsage, err: fmt.Errorf("--socket-group: nobody but root gets into the run directory %s, where the socket is", c.RunDir),
			hint: "give --socket a path in a directory that the group can enter, such as /run/forkd.sock"}
	}
	return server.SocketAccess{Group: gid, Scope: keys.Scope(c.SocketScope)}, nil
}

// certificate is the daemon's; nil: it speaks no TLS.
type certificate struct{ *server.Certificate }

func (c *serveCmd) certificate(log *slog.Logger) (*certificate, error) {
	switch {
	case c.TLSCert == "" && c.TLSKey == "":
		return nil, nil
	case c.TLSCert == "" || c.TLSKey == "":
		return nil, &codedError{code: exitUsage, err: errors.New("--tls-cert and --tls-key are a pair: give both")}
	}
	cert, err := server.LoadCertificate(c.TLSCert, c.TLSKey, log)
	if err != nil {
		return nil, err
	}
	return &certificate{cert}, nil
}
