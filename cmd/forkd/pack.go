package main

import (
	"crypto/ed25519"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/forkd/forkd/client"
	"github.com/forkd/forkd/internal/snapshot/pack"
)

type packCmd struct {
	Tag  string `required:"" help:"Tag of the snapshot."`
	Out  string `required:"" short:"o" placeholder:"FILE" help:"File to write; - is standard output."`
	Sign string `placeholder:"KEY" help:"Sign it with this private key, as forkd pack-key makes one. The key stays here."`

	IncludeSecrets bool `help:"The pack may have the secrets that are in the snapshot's memory."`
}

// Help says what is in a pack.
func (c *packCmd) Help() string {
	return "Writes a snapshot, all it rests on and its image to one file that forkd unpack takes in on another machine. The same snapshot is " +
		"the same file."
}

// Run writes a pack.
func (c *packCmd) Run(p *program) error {
	if c.Out == "-" && isTerminal(p.stdout) {
		return badUsage("send it to a file or a program", "a pack is nothing for a terminal")
	}
	opt, err := signWith(c.Sign)
	if err != nil {
		return err
	}
	opt.IncludeSecrets = c.IncludeSecrets
	cl, err := p.client()
	if err != nil {
		return err
	}
	body, err := cl.Pack(p.ctx, c.Tag, opt)
	if err != nil {
		return err
	}
	defer body.Close()
	in := p.meter(body, "pack "+c.Tag, 0)
	err = c.write(p, in)
	in.end()
	if err != nil {
		return err
	}
	if p.cli.JSON && c.Out != "-" {
		return p.printJSON(map[string]any{"tag": c.Tag, "file": c.Out, "bytes": in.count, "signed": c.Sign != ""})
	}
	p.say("packed %s: %s", c.Tag, size(in.count))
	return nil
}

// signWith makes the pack be signed with the key in a file; "": not at all.
func signWith(file string) (client.PackOptions, error) {
	if file == "" {
		return client.PackOptions{}, nil
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return client.PackOptions{}, fmt.Errorf("key to sign with: %w", err)
	}
	key, err := pack.ParsePrivateKey(data)
	if err != nil {
		return client.PackOptions{}, &codedError{code: exitError, err: fmt.Errorf("%s: %w", file, err), hint: "`forkd pack-key` makes one"}
	}
	return client.PackOptions{Sign: func(contents []byte) ([]byte, error) { return pack.Sign(key, contents) }}, nil
}

// write puts the pack where it is to be.
func (c *packCmd) write(p *program, in io.Reader) error {
	if c.Out == "-" {
		return copyPack(p.stdout, in)
	}
	info, err := os.Stat(c.Out)
	if err == nil && !info.Mode().IsRegular() { // a device or a pipe: nothing may take its place
		f, err := os.OpenFile(c.Out, os.O_WRONLY, 0)
		if err != nil {
			return fmt.Errorf("write the pack: %w", err)
		}
		return errors.Join(copyPack(f, in), f.Close())
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("write the pack: %w", err)
	}
	return replaceFile(c.Out, in)
}

// replaceFile gives a file its new content, all of it or none.
func replaceFile(path string, in io.Reader) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), ".forkd-pack-*")
	if err != nil {
		return fmt.Errorf("write the pack: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	if err := errors.Join(copyPack(f, in), f.Chmod(0o644), f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return fmt.Errorf("write the pack: %w", err)
	}
	return nil
}

func copyPack(w io.Writer, in io.Reader) error {
	_, err := io.CopyBuffer(struct{ io.Writer }{w}, in, make([]byte, 256<<10))
	var daemon *client.Error
	if err == nil || errors.As(err, &daemon) {
		return err
	}
	return fmt.Errorf("write the pack: %w", err)
}

// readKey reads a public key.
func readKey(file string) (ed25519.PublicKey, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("public key: %w", err)
	}
	key, err := pack.ParsePublicKey(data)
	if err != nil {
		return nil, &codedError{code: exitError, err: fmt.Errorf("%s: %w", file, err), hint: "it is the FILE.pub that `forkd pack-key` makes"}
	}
	return key, nil
}
