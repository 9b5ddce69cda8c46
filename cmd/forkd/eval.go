package main

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/forkd/forkd/client"
)

type evalCmd struct {
	ID      string        `arg:"" help:"Id of the sandbox."`
	Code    string        `arg:"" help:"Python; - reads it from standard input."`
	Timeout time.Duration `default:"30s" help:"Interrupt it after this long."`
}

// Run evaluates code: what it printed and the last expression's repr go to stdout, a traceback to stderr.
func (c *evalCmd) Run(p *program) error {
	code := c.Code
	if code == "-" {
		data, err := io.ReadAll(io.LimitReader(p.stdin, maxStdin))
		if err != nil {
			return fmt.Errorf("read standard input: %w", err)
		}
		code = string(data)
	}
	cl, err := p.client()
	if err != nil {
		return err
	}
	res, err := cl.Eval(p.ctx, c.ID, client.EvalRequest{Code: code, Timeout: c.Timeout})
	if err != nil {
		return err
	}
	if p.cli.JSON {
		if err := p.printJSON(res); err != nil {
			return err
		}
	} else {
		fmt.Fprint(p.stdout, res.Stdout)
		fmt.Fprint(p.stderr, res.Stderr)
		if res.Result != nil {
			fmt.Fprintln(p.stdout, *res.Result)
		}
		if res.Error != nil {
			fmt.Fprintln(p.stderr, strings.TrimRight(*res.Error, "\n"))
		}
		if res.Truncated {
			p.say("forkd: output was cut")
		}
		p.sayShort(res.OomKilled, res.DiskFull)
	}
	if res.Error != nil {
		return &codedError{code: exitError}
	}
	return nil
}
