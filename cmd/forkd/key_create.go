package main

import (
	"fmt"
	"time"

	"github.com/forkd/forkd/client"
)

type keyCreateCmd struct {
	Name         string  `required:"" help:"What the key is for; lists and the audit record name it."`
	Scope        string  `enum:"read,run,admin" default:"run" help:"What it is good for: ${enum}. read: look; run: also sandboxes and snapshots; admin: also the tenant's keys, pools and packs."`
	Tenant       string  `help:"Whose things it is about. Default: one's own tenant."`
	Expires      string  `placeholder:"WHEN" help:"When it ends: a time from now such as 720h or 30d, or a date such as 2030-01-31. Default: never."`
	MaxSandboxes int     `placeholder:"N" help:"Sandboxes that may live that it started. Default: as many as its tenant may have."`
	Rate         float64 `placeholder:"R" help:"Requests a second. Default: the daemon's --key-rate."`
	Burst        int     `placeholder:"N" help:"Requests at once, with --rate. Default: two seconds' worth."`
	Quiet        bool    `short:"q" help:"Print the key only."`
}

// Help says what becomes of a daemon with keys.
func (c *keyCreateCmd) Help() string {
	return "The key goes to whoever is to use it, as FORKD_TOKEN or as Authorization: Bearer …; the daemon keeps only its digest. From the first key " +
		"on the daemon answers over TCP only to who has one, or its --token-file; on the Unix socket root stays an administrator."
}

// Run makes a key.
func (c *keyCreateCmd) Run(p *program) error {
	expires, err := keyExpiry(c.Expires, time.Now())
	if err != nil {
		return &codedError{code: exitUsage, err: err}
	}
	cl, err := p.client()
	if err != nil {
		return err
	}
	made, err := cl.CreateKey(p.ctx, client.KeyRequest{Name: c.Name, Scope: client.KeyScope(c.Scope), Tenant: c.Tenant, ExpiresAtUnix: expires,
		MaxSandboxes: c.MaxSandboxes, RatePerSec: c.Rate, Burst: c.Burst})
	switch {
	case err != nil:
		return err
	case p.cli.JSON:
		return p.printJSON(made)
	case !c.Quiet:
		p.say("key %s: %s, scope %s, tenant %s. It can't be shown again:", made.Key.ID, made.Key.Name, made.Key.Scope, made.Key.Tenant)
	}
	return p.lines([]string{made.Token})
}

// keyExpiry reads when a key ends; 0 for never.
func keyExpiry(text string, now time.Time) (int64, error) {
	if text == "" {
		return 0, nil
	}
	if at, err := time.Parse(time.DateOnly, text); err == nil {
		return at.Unix(), nil
	}
	if at, err := time.Parse(time.RFC3339, text); err == nil {
		return at.Unix(), nil
	}
	var days int
	if n, err := fmt.Sscanf(text, "%dd", &days); err == nil && n == 1 && text == fmt.Sprintf("%dd", days) && days > 0 {
		return now.AddDate(0, 0, days).Unix(), nil
	}
	if d, err := time.ParseDuration(text); err == nil && d > 0 {
		return now.Add(d).Unix(), nil
	}
	return 0, fmt.Errorf("--expires %q: use a time from now such as 720h or 30d, or a date such as 2030-01-31", text)
}
