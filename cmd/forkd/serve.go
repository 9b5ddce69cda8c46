package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/forkd/forkd/internal/server"
	"github.com/forkd/forkd/internal/thread"
	"github.com/forkd/forkd/internal/vmm"
)

type serveCmd struct {
	daemonFlags
	Listen       string        `default:"127.0.0.1:8889" help:"TCP address; empty: none. One that others can reach needs TLS, and keys or a token."`
	Socket       string        `placeholder:"FILE" help:"Unix socket. Default: forkd.sock in the run directory."`
	TLSCert      string        `name:"tls-cert" placeholder:"FILE" help:"Speak TLS over TCP, with this certificate and its chain (PEM). It is read again when it changes, and on SIGHUP."`
	TLSKey       string        `name:"tls-key" placeholder:"FILE" help:"The certificate's private key (PEM)."`
	SocketGroup  string        `placeholder:"GROUP" help:"Let the members of this group use the socket too; it must not be in the run directory then."`
	SocketScope  string        `enum:"read,run,admin" default:"run" help:"What they may do there: ${enum}."`
	TokenFile    string        `placeholder:"FILE" help:"File with a bearer token: an administrator of the default tenant, besides the keys. It is read again on SIGHUP."`
	DrainTimeout time.Duration `default:"30s" help:"How long requests may go on after a signal to stop."`
	LogFormat    string        `enum:"text,json" default:"text" help:"Log as ${enum}."`
	LogLevel     string        `enum:"debug,info,warn,error" default:"info" help:"Log from this level: ${enum}."`
}

// Help says how a daemon is stopped.
func (c *serveCmd) Help() string {
	return "SIGTERM and Ctrl-C stop the daemon after requests that are being answered; a second signal stops it at once. " +
		"Sandboxes go on running and are found again by the next daemon: `forkd kill --all` ends them."
}

// Run runs the daemon until the program is told to stop.
func (c *serveCmd) Run(p *program) error {
	hangups := make(chan os.Signal, 1)
	signal.Notify(hangups, syscall.SIGHUP) // before anything else: it must not end the daemon
	defer signal.Stop(hangups)
	thread.Widen()
	if err := c.fillDefaults(p.getenv); err != nil {
		return err
	}
	if c.Socket == "" {
		c.Socket = filepath.Join(c.RunDir, "forkd.sock")
	}
	log := p.logger(c.LogFormat, c.LogLevel)
	token, err := readToken(c.TokenFile)
	if err != nil {
		return err
	}
	d, err := p.openDaemon(&c.daemonFlags, log, false)
	if err != nil {
		return err
	}
	socket, err := c.socketAccess()
	if err != nil {
		return errors.Join(err, d.close())
	}
	cert, err := c.certificate(log)
	if err != nil {
		return errors.Join(err, d.close())
	}
	unixListener, tcpListener, err := c.listen(p.getenv, token != "" || d.keys.Any(), cert, socket)
	if err != nil {
		return errors.Join(err, d.close())
	}
	again := &reloading{hangups: hangups, cert: cert, tokenFile: c.TokenFile, log: log}
	err = c.serve(p, d, token, socket, unixListener, tcpListener, again, log)
	return errors.Join(err, d.close())
}

func (c *serveCmd) listen(getenv func(string) string, guarded bool, cert *certificate, socket server.SocketAccess) (unixListener, tcpListener net.Listener, err error) {
	var groups []int
	if socket.Scope != "" {
		groups = append(groups, socket.Group)
	}
	if unixListener, err = passedListener(getenv); err != nil {
		return nil, nil, err
	}
	if unixListener == nil {
		if unixListener, err = server.ListenUnix(c.Socket, groups...); err != nil {
			return nil, nil, err
		}
	}
	if c.Listen == "" {
		return unixListener, nil, nil
	}
	if tcpListener, err = server.ListenTCP(c.Listen, server.Protection{Keys: guarded, TLS: cert != nil}); err != nil {
		return nil, nil, errors.Join(err, unixListener.Close())
	}
	if cert != nil {
		tcpListener = cert.Listener(tcpListener)
	}
	return unixListener, tcpListener, nil
}

// serve finds out what an earlier daemon left, answers requests, and drains.
func (c *serveCmd) serve(p *program, d *daemon, token string, socket server.SocketAccess, unixListener, tcpListener net.Listener, again *reloading, log *slog.Logger) error {
	recovery, err := d.manager.Recover(p.ctx)
	if err != nil {
		closeAll(unixListener, tcpListener)
		return fmt.Errorf("recover what an earlier daemon left: %w", err)
	}
	log.Info("recovered", "adopted", recovery.Adopted, "lost", recovery.Lost, "aborted", recovery.Aborted, "reaped", recovery.Reaped,
		"snapshots", recovery.Snapshots, "finished", recovery.Finished, "dirs", recovery.Dirs, "unknown", strings.Join(recovery.Unknown, " "))
	if d.networks != nil {
		d.networks.Start()
	}
	probed := make(chan struct{})
	go func() {
		defer close(probed)
		logEngine(p.ctx, d.engine, log)
	}()
	srv := server.New(server.Config{Service: d.manager, Images: d.images, Packs: d.packs, Events: d.events, Timings: d.timings, Audit: d.audit, Version: ownVersion(), Token: token, Engine: engineName(d.engine),
		Keys: d.keys, KeyRate: c.keyLimit(), Socket: socket, Log: log.With("part", "server")})
	defer again.on(srv)()
	tcp := ""
	if tcpListener != nil {
		tcp = tcpListener.Addr().String()
	}
	log.Info("ready", "socket", c.Socket, "listen", tcp, "data", c.Data, "version", version)
	notifySystemd(p.getenv, "READY=1")
	stopping := context.AfterFunc(p.ctx, func() {
		log.Info("stopping", "drain_timeout", c.DrainTimeout)
		notifySystemd(p.getenv, "STOPPING=1")
	})
	defer stopping()
	err = srv.Serve(p.ctx, unixListener, tcpListener, c.DrainTimeout)

	drain, cancel := context.WithTimeout(context.WithoutCancel(p.ctx), c.DrainTimeout)
	defer cancel()
	if shutdownErr := d.manager.Shutdown(drain); shutdownErr != nil {
		err = errors.Join(err, fmt.Errorf("shut down: %w", shutdownErr))
	}
	<-probed
	log.Info("stopped")
	return err
}

func closeAll(listeners ...net.Listener) {
	for _, l := range listeners {
		if l != nil {
			_ = l.Close()
		}
	}
}

// logEngine finds out early what can't work, for whoever reads the log.
func logEngine(ctx context.Context, engine vmm.Engine, log *slog.Logger) {
	info, err := engine.Probe(ctx)
	switch {
	case ctx.Err() != nil:
	case err != nil:
		log.Warn("machines can't be started on this host: `forkd doctor` says what to do", "error", err)
	default:
		log.Info("engine", "name", info.Engine, "version", info.Version, "accel", info.Accel, "cpu", info.CPU)
	}
}

// engineName returns what tells an engine's name, empty when it can't run here.
func engineName(engine vmm.Engine) func(context.Context) string {
	return func(ctx context.Context) string {
		info, err := engine.Probe(ctx)
		if err != nil {
			return ""
		}
		return info.Engine
	}
}

// minToken keeps tokens away that can be guessed.
const minToken = 16

func readToken(path string) (string, error) {
	if path == "" {
		return "", nil
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("token file: %w", err)
	}
	token := strings.TrimSpace(string(data))
	if len(token) < minToken {
		return "", fmt.Errorf("token file %s: the token has %d characters, at least %d are needed: make one with `openssl rand -hex 32`", path, len(token), minToken)
	}
	if strings.ContainsAny(token, " \t\r\n") {
		return "", fmt.Errorf("token file %s: the token has white space in it: one word is needed", path)
	}
	return token, nil
}

// logger writes to stderr. Under systemd the journal has the time.
func (p *program) logger(format, level string) *slog.Logger {
	var min slog.Level
	_ = min.UnmarshalText([]byte(level)) // the flag's enum has only levels
	opts := &slog.HandlerOptions{Level: min}
	if p.getenv("JOURNAL_STREAM") != "" {
		opts.ReplaceAttr = func(groups []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey && len(groups) == 0 {
				return slog.Attr{}
			}
			return a
		}
	}
	if format == "json" {
		return slog.New(slog.NewJSONHandler(p.stderr, opts))
	}
	return slog.New(slog.NewTextHandler(p.stderr, opts))
}

// notifySystemd tells the service manager, if there is one that wants to know. It is no error when it can't be told.
func notifySystemd(getenv func(string) string, state string) {
	path := getenv("NOTIFY_SOCKET")
	if path == "" {
		return
	}
	conn, err := net.Dial("unixgram", path)
	if err != nil {
		return
	}
	defer conn.Close()
	_, _ = conn.Write([]byte(state))
}
