package lab

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/forkd/forkd/test/lab/guest"
)

// A program that opens labs is started again by this package to play a part in which it is confined by namespaces, and it is copied into
// the lab to serve there. PlayRole is where that begins.
const (
	roleEnv   = "FORKD_LAB_ROLE"
	roleQEMU  = "qemu"  // turns into the outer QEMU
	roleBuild = "build" // builds a file for the cache
)

// PlayRole does what this process was started for and returns its exit code, if it was started by this package. Every program that
// calls Open calls it first. Inside the lab the program runs as `lab guest`.
func PlayRole() (code int, played bool) {
	role := os.Getenv(roleEnv)
	if os.Getpid() != 1 && role != "" {
		return 0, false // a child that inherited the variable
	}
	var err error
	switch {
	case role == roleQEMU:
		err = withConfig(enterQEMU)
	case role == roleBuild:
		err = withConfig(runRecipe)
	case len(os.Args) == 2 && os.Args[1] == "guest":
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		defer stop()
		err = guest.Run(ctx)
	default:
		return 0, false
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "lab:", err)
		return 1, true
	}
	return 0, true
}

func withConfig[T any](play func(T) error) error {
	var cfg T
	if len(os.Args) != 2 {
		return fmt.Errorf("a role needs one argument, got %d", len(os.Args)-1)
	}
	if err := json.Unmarshal([]byte(os.Args[1]), &cfg); err != nil {
		return fmt.Errorf("argument of a role: %w", err)
	}
	if err := os.Unsetenv(roleEnv); err != nil {
		return err
	}
	return play(cfg)
}
