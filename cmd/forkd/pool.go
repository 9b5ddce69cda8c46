package main

import (
	"strconv"

	"github.com/forkd/forkd/client"
)

type poolCmd struct {
	Tag  string `arg:"" help:"Tag of the snapshot."`
	Size *int   `placeholder:"N" help:"Keep this many children ready; 0 empties the pool. Without it the pool is only shown."`
}

// Run sets or shows a pool.
func (c *poolCmd) Run(p *program) error {
	cl, err := p.client()
	if err != nil {
		return err
	}
	var pool client.Pool
	if c.Size != nil {
		pool, err = cl.SetPool(p.ctx, c.Tag, *c.Size)
	} else {
		pool, err = cl.Pool(p.ctx, c.Tag)
	}
	switch {
	case err != nil:
		return err
	case p.cli.JSON:
		return p.printJSON(pool)
	}
	if pool.Problem != "" {
		p.say("the pool can't be filled: %s", pool.Problem)
	}
	return p.table([]string{"TAG", "SIZE", "READY", "FILLING"},
		[][]string{{pool.Tag, strconv.Itoa(pool.Size), strconv.Itoa(pool.Ready), strconv.Itoa(pool.Filling)}})
}
