package main

import (
	"path/filepath"

	"github.com/forkd/forkd/client"
)

type imageBuildCmd struct {
	Name     string   `arg:"" help:"Name of the image; it moves here from an older one."`
	Packages []string `placeholder:"P,…" help:"Debian packages besides the standard ones."`
	Suite    string   `help:"Debian release. Default: the daemon's."`
	Mirror   string   `placeholder:"URL" help:"Where packages come from. Default: as the daemon's host has it."`
	Kernel   string   `placeholder:"FILE" help:"A kernel (bzImage) of your own, on the daemon's host."`
	Modules  string   `placeholder:"DIR" help:"The modules of that kernel. Default: all that is needed is built in."`
	Rootfs   string   `placeholder:"PATH" help:"A root file system of your own: an erofs, squashfs or ext4 image, a tar archive, or a directory."`
	Python   bool     `help:"The root file system image has a python3 (it can't be seen from outside)."`
	Force    bool     `help:"Build even when nothing changed."`
	Quiet    bool     `short:"q" help:"Print the id only."`
}

// Run builds an image and shows the steps.
func (c *imageBuildCmd) Run(p *program) error {
	cl, err := p.client()
	if err != nil {
		return err
	}
	req := client.ImageBuildRequest{Name: c.Name, Packages: c.Packages, Suite: c.Suite, Mirror: c.Mirror, Python: c.Python, Force: c.Force}
	for _, path := range []struct {
		from string
		to   *string
	}{{c.Kernel, &req.Kernel}, {c.Modules, &req.Modules}, {c.Rootfs, &req.Rootfs}} {
		if *path.to, err = absolute(path.from); err != nil {
			return err
		}
	}
	steps := p.progress()
	img, err := cl.BuildImage(p.ctx, req, steps.report)
	steps.end()
	switch {
	case err != nil:
		return err
	case p.cli.JSON:
		return p.printJSON(img)
	case c.Quiet:
		return p.lines([]string{img.ID})
	}
	return p.imageTable([]client.Image{img})
}

// absolute makes a path one that the daemon, which runs elsewhere, understands.
func absolute(path string) (string, error) {
	if path == "" {
		return "", nil
	}
	return filepath.Abs(path)
}
