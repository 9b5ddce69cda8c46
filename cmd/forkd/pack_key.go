package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/forkd/forkd/internal/snapshot/pack"
)

type packKeyCmd struct {
	File string `arg:"" help:"File for the private key; the public one goes to FILE.pub. Neither may exist."`
}

// Help says what the keys are for.
func (c *packKeyCmd) Help() string {
	return "Makes an Ed25519 key pair (PEM): `forkd pack --sign FILE` signs with the one, `forkd unpack --require-signature FILE.pub` accepts " +
		"only what was signed with it. The private key is never sent to a daemon."
}

// Run makes a key pair.
func (c *packKeyCmd) Run(p *program) error {
	private, public, err := pack.GenerateKey()
	if err != nil {
		return err
	}
	if err := writeNew(c.File, private, 0o600); err != nil {
		return err
	}
	publicFile := c.File + ".pub"
	if err := writeNew(publicFile, public, 0o644); err != nil {
		return errors.Join(err, os.Remove(c.File)) // half a pair is of no use
	}
	if p.cli.JSON {
		return p.printJSON(map[string]string{"private": c.File, "public": publicFile})
	}
	return p.lines([]string{c.File, publicFile})
}

// writeNew writes a file that must not be there yet.
func writeNew(path string, data []byte, perm os.FileMode) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, perm)
	if err != nil {
		return fmt.Errorf("write a key: %w", err)
	}
	_, err = f.Write(data)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return errors.Join(fmt.Errorf("write a key: %w", err), os.Remove(path))
	}
	return nil
}
