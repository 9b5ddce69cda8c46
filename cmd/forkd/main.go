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
	"time"
)

func main() {
	ctx, stop := untilSignal()
	code := Run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr, os.Environ())
	stop()
	os.Exit(code)
}

// oneSignal is for how long signals are taken for one: timeout(1) sends two, to the process and to its group, and so does ^C below it.
const oneSignal = time.Second

// untilSignal returns a context that ends with the first signal that asks for that. Another one, later, ends the process at once.
func untilSignal() (context.Context, context.CancelFunc) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, func() { time.AfterFunc(oneSignal, stop) })
	return ctx, stop
}
