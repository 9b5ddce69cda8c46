// Command forkd-agent is the init and the agent of a forkd guest; internal/guest/agent has its code.
package main

import (
	"os"

	"github.com/forkd/forkd/internal/guest/agent"
)

func main() { os.Exit(agent.Run(os.Args, os.Stderr)) }
