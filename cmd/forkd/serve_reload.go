package main

import (
	"log/slog"
	"os"

	"github.com/forkd/forkd/internal/server"
)

// reloading is what a daemon reads again on SIGHUP: its certificate and its token. What can't be used changes nothing.
type reloading struct {
	hangups   chan os.Signal
	cert      *certificate // nil: it speaks no TLS
	tokenFile string       // "": it has none
	log       *slog.Logger
}

// on reads them again at each signal, until the returned function is called.
func (r *reloading) on(srv *server.Server) (stop func()) {
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-r.hangups:
				r.again(srv)
			case <-done:
				return
			}
		}
	}()
	return func() { close(done); <-ended }
}

func (r *reloading) again(srv *server.Server) {
	if r.cert == nil && r.tokenFile == "" {
		r.log.Info("SIGHUP: there is nothing to read again")
		return
	}
	if r.cert != nil {
		if err := r.cert.Reload(); err != nil {
			r.log.Warn("SIGHUP: the certificate stays as it was", "error", err)
		} else {
			r.log.Info("SIGHUP: the certificate was read again")
		}
	}
	if r.tokenFile == "" {
		return
	}
	token, err := readToken(r.tokenFile)
	if err != nil {
		r.log.Warn("SIGHUP: the token stays as it was", "error", err)
		return
	}
	srv.SetToken(token)
	r.log.Info("SIGHUP: the token was read again")
}
