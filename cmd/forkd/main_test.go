package main

import (
	"context"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"testing"
	"time"
)

// TestSignalsAtOnce: two signals that come together, as timeout(1) sends them, leave the time to clean up; one that comes later does not.
func TestSignalsAtOnce(t *testing.T) {
	const role = "FORKD_TEST_SIGNALS"
	if os.Getenv(role) != "" {
		ctx, _ := untilSignal() // not stopped: the second signal may come after the one that ends this
		os.Stdout.WriteString("ready")
		<-ctx.Done()
		again := make(chan os.Signal, 1)
		signal.Notify(again, syscall.SIGUSR1) // it ends the cleaning up
		os.Stdout.WriteString("again")
		<-again
		return
	}
	for name, tt := range map[string]struct {
		wait time.Duration
		want string
	}{"at once": {0, "exit status 0"}, "later": {2 * oneSignal, "signal: terminated"}} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			cmd := exec.CommandContext(ctx, os.Args[0], "-test.run=^TestSignalsAtOnce$")
			cmd.Env = append(os.Environ(), role+"=1")
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			said := make([]byte, 5)
			tell := func(sig os.Signal) {
				if err := cmd.Process.Signal(sig); err != nil {
					t.Fatal(err)
				}
			}
			for _, step := range []struct {
				wait time.Duration
				sig  os.Signal
			}{{0, syscall.SIGTERM}, {tt.wait, syscall.SIGTERM}} {
				if _, err := out.Read(said); err != nil {
					t.Fatal(err)
				}
				time.Sleep(step.wait) // the time between two signals is what this is about
				tell(step.sig)
			}
			_ = cmd.Process.Signal(syscall.SIGUSR1) // the process may have ended
			_ = cmd.Wait()
			if got := cmd.ProcessState.String(); got != tt.want {
				t.Errorf("it ended with %q, want %q", got, tt.want)
			}
		})
	}
}
