// Package client is the Go client of a forkd daemon. The command line, the MCP server and the tests speak to the daemon through
// it and nothing else.
//
//	c, err := client.New(client.Config{})               // FORKD_URL and FORKD_TOKEN, else the daemon of this host
//	sandboxes, err := c.Fork(ctx, client.ForkRequest{SnapshotTag: "py", N: client.Int(3)})
//	out, err := c.Exec(ctx, sandboxes[0].ID, client.ExecRequest{Args: []string{"uname", "-a"}})
//	err = c.Kill(ctx, sandboxes[0].ID)
//
// Requests and answers are the types of package api, under shorter names. Errors of the daemon are *Error; a fork of which some
// children failed is a *PartialError beside the sandboxes that are ready. A Client is safe for concurrent use.
//
// This package starts no daemon, retries nothing and keeps no state but connections.
package client
