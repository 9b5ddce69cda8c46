package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/forkd/forkd/client"
)

type unpackCmd struct {
	File             string   `arg:"" help:"A pack; - is standard input."`
	Tag              string   `help:"Name of the snapshot here. Default: the file's name up to the first dot."`
	RequireSignature []string `sep:"none" placeholder:"PUB" help:"Take only what is signed with this public key (FILE.pub of forkd pack-key). May be given again."`
	Quiet            bool     `short:"q" help:"Print the tag only."`
}

// Help says when something is published.
func (c *unpackCmd) Help() string {
	return "Everything in a pack is verified before any of it is there to be used; a pack that is refused leaves nothing. A snapshot is a " +
		"program that runs: take packs only from whom you trust."
}

var tagPattern = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)

// Run takes a pack in.
func (c *unpackCmd) Run(p *program) error {
	if c.Tag == "" {
		c.Tag, _, _ = strings.Cut(filepath.Base(c.File), ".")
		if c.File == "-" || !tagPattern.MatchString(c.Tag) {
			return badUsage("give --tag", "the name %q can't be the snapshot's tag", c.File)
		}
	}
	opt := client.UnpackOptions{Tag: c.Tag}
	for _, file := range c.RequireSignature {
		key, err := readKey(file)
		if err != nil {
			return err
		}
		opt.Signers = append(opt.Signers, key)
	}
	cl, err := p.client()
	if err != nil {
		return err
	}
	file, total, err := c.open(p)
	if err != nil {
		return err
	}
	defer file.Close()
	in := p.meter(file, "unpack "+c.Tag, total)
	res, err := cl.Unpack(p.ctx, in, opt)
	in.end()
	switch {
	case err != nil:
		return err
	case p.cli.JSON:
		return p.printJSON(res)
	}
	if len(res.NewSnapshots) == 0 {
		p.say("all of it was here already")
	}
	if res.SignedBy != nil {
		p.say("signed by %s", *res.SignedBy)
	}
	return p.printSnapshot(res.Snapshot, c.Quiet)
}

// open returns the pack and its size; 0 when that is not known.
func (c *unpackCmd) open(p *program) (io.ReadCloser, int64, error) {
	if c.File == "-" {
		return io.NopCloser(p.stdin), 0, nil
	}
	f, err := os.Open(c.File)
	if err != nil {
		return nil, 0, fmt.Errorf("read the pack: %w", err)
	}
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() {
		return f, 0, err
	}
	return f, info.Size(), nil
}
