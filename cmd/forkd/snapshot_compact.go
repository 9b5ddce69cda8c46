package main

type snapshotCompactCmd struct {
	From  string `required:"" placeholder:"TAG" help:"Tag of the snapshot."`
	To    string `required:"" placeholder:"TAG" help:"Name of the new one."`
	Quiet bool   `short:"q" help:"Print the tag only."`
}

// Help says what it is for.
func (c *snapshotCompactCmd) Help() string {
	return "Stores a snapshot anew so that it rests on no other: what it rested on can be deleted then. The old snapshot stays as it is."
}

// Run stores a snapshot anew.
func (c *snapshotCompactCmd) Run(p *program) error {
	cl, err := p.client()
	if err != nil {
		return err
	}
	snap, err := cl.Compact(p.ctx, c.From, c.To)
	if err != nil {
		return err
	}
	return p.printSnapshot(snap, c.Quiet)
}
