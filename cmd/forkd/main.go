// Command forkd starts virtual machines from warmed, frozen ones. It is the daemon (forkd serve) and the command line that talks to
// it through the public Go client.
//
// This package has flags, output and the daemon's wiring (wire.go), one file a command. It has no logic of its own: that is in
// internal/ and client/.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	code := Run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr, os.Environ())
	stop()
	os.Exit(code)
}
