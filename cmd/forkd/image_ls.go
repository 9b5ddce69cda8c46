package main

import "github.com/forkd/forkd/client"

type imageLsCmd struct {
	Quiet bool `short:"q" help:"Print names only (ids of those without a name)."`
}

// Run lists the images.
func (c *imageLsCmd) Run(p *program) error {
	cl, err := p.client()
	if err != nil {
		return err
	}
	list, err := cl.Images(p.ctx)
	switch {
	case err != nil:
		return err
	case p.cli.JSON:
		return p.printJSON(list)
	case c.Quiet:
		var names []string
		for _, img := range list {
			if img.Name == "" {
				img.Name = img.ID
			}
			names = append(names, img.Name)
		}
		return p.lines(names)
	}
	return p.imageTable(list)
}

func (p *program) imageTable(list []client.Image) error {
	var rows [][]string
	for _, img := range list {
		rows = append(rows, []string{dash(img.Name), img.ID, size(img.RootfsBytes + img.KernelBytes + img.InitramfsBytes), img.KernelVersion,
			dash(img.Suite), yesNo(img.Python), ago(img.CreatedAtUnix)})
	}
	return p.table([]string{"NAME", "ID", "SIZE", "KERNEL", "SUITE", "PYTHON", "CREATED"}, rows)
}
