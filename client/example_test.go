package client_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/forkd/forkd/client"
)

func Example() {
	ctx := context.Background()
	c, err := client.New(client.Config{})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	sandboxes, err := c.Fork(ctx, client.ForkRequest{SnapshotTag: "py", N: client.Int(3)})
	if err != nil {
		log.Fatal(err)
	}
	for _, s := range sandboxes {
		out, err := c.Eval(ctx, s.ID, client.EvalRequest{Code: "1 + 1"})
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(s.ID, *out.Result)
		if err := c.Kill(ctx, s.ID); err != nil {
			log.Fatal(err)
		}
	}
}

// Some of several children may fail, for example because memory ran out. The others are there to be used, or to be killed.
func ExampleClient_Fork() {
	ctx := context.Background()
	c, err := client.New(client.Config{URL: "http://127.0.0.1:8889", Token: "…"})
	if err != nil {
		log.Fatal(err)
	}
	sandboxes, err := c.Fork(ctx, client.ForkRequest{SnapshotTag: "py", N: client.Int(100)})
	var partial *client.PartialError
	switch {
	case errors.As(err, &partial):
		log.Printf("going on with %d: %v", len(sandboxes), partial)
	case client.IsCode(err, "snapshot_not_found"):
		log.Fatal("create the snapshot first")
	case err != nil:
		log.Fatal(err)
	}
}

func ExampleClient_CreateSnapshot() {
	c, err := client.New(client.Config{})
	if err != nil {
		log.Fatal(err)
	}
	req := client.SnapshotRequest{Tag: "py", Image: "py", WarmUp: []client.WarmUp{{Kind: "eval", Code: "import numpy"}}}
	snap, err := c.CreateSnapshot(context.Background(), req, func(p client.Progress) { log.Println(p.Step, p.Detail) })
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(snap.Tag)
}
