package main

type keyRevokeCmd struct {
	IDs []string `arg:"" name:"ids" help:"Ids of keys, as forkd key ls shows them."`
}

// Run revokes keys; one that can't be revoked does not keep the others.
func (c *keyRevokeCmd) Run(p *program) error {
	cl, err := p.client()
	if err != nil {
		return err
	}
	return p.each(c.IDs, "revoked", func(id string) error { return cl.RevokeKey(p.ctx, id) })
}
