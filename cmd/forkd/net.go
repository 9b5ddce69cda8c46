package main

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/client"
)

// networkFlags say what machines may reach.
type networkFlags struct {
	Network   string   `placeholder:"MODE" help:"What they may reach: none, allow (what --allow says) or open (all but what is protected)."`
	Allow     []string `placeholder:"RULE" help:"Domain, *.DOMAIN, IPv4 address or CIDR, with :PORT or :LOW-HIGH, and /tcp or /udp; implies --network allow. May be given again."`
	Bandwidth int      `name:"bandwidth-mbit" placeholder:"N" help:"Limit in Mbit/s of what goes in, and of what goes out."`
}

// policy is what the flags ask for; nil: nothing.
func (f networkFlags) policy() (*client.NetworkPolicy, error) {
	mode := f.Network
	if mode == "" && len(f.Allow) > 0 {
		mode = string(api.NetworkPolicyModeAllow)
	}
	if mode == "" && f.Bandwidth != 0 {
		return nil, badUsage("give --network as well", "--bandwidth-mbit alone says nothing")
	}
	if mode == "" {
		return nil, nil
	}
	p := &client.NetworkPolicy{Mode: api.NetworkPolicyMode(mode), Allow: f.Allow, BandwidthMbit: f.Bandwidth}
	if !p.Mode.Valid() {
		return nil, badUsage("use none, allow or open", "--network %s is not known", mode)
	}
	return p, nil
}

type netCmd struct {
	ID  string `arg:"" help:"Id of the sandbox."`
	Set string `placeholder:"MODE" help:"Change what it may reach, at once: none, allow (with --allow) or open."`

	Allow     []string `placeholder:"RULE" help:"Domain, *.DOMAIN, IPv4 address or CIDR, with :PORT or :LOW-HIGH, and /tcp or /udp; implies --set allow. May be given again."`
	Bandwidth int      `name:"bandwidth-mbit" placeholder:"N" help:"Limit in Mbit/s of what goes in, and of what goes out."`
}

// Run shows or changes what a sandbox may reach.
func (c *netCmd) Run(p *program) error {
	policy, err := networkFlags{c.Set, c.Allow, c.Bandwidth}.policy()
	if err != nil {
		return err
	}
	cl, err := p.client()
	if err != nil {
		return err
	}
	var st client.NetworkStatus
	if policy != nil {
		st, err = cl.SetNetwork(p.ctx, c.ID, *policy)
	} else {
		st, err = cl.Network(p.ctx, c.ID)
	}
	if err != nil {
		return err
	}
	if p.cli.JSON {
		return p.printJSON(st)
	}
	return p.printNetwork(st)
}

func (p *program) printNetwork(st client.NetworkStatus) error {
	err := p.facts([][2]string{
		{"id", st.ID}, {"policy", policyText(&st.Policy)}, {"sent", size(st.SentBytes)}, {"received", size(st.ReceivedBytes)},
		{"denied attempts", count(st.DeniedAttempts)}, {"IPv6 packets", count(st.Ipv6Packets)}, {"forged packets", count(st.ForgedPackets)},
		{"monitor's packets", count(st.MonitorPackets)},
	})
	if err != nil || len(st.Denied)+len(st.DeniedNames) == 0 {
		return err
	}
	var rows [][]string
	for _, n := range st.DeniedNames {
		rows = append(rows, []string{n.Name, "name", "", count(n.Count), time.Unix(n.LastUnix, 0).Format(time.TimeOnly)})
	}
	for _, d := range st.Denied {
		port := ""
		if d.Port != 0 {
			port = strconv.Itoa(d.Port)
		}
		rows = append(rows, []string{d.Addr, d.Proto, port, count(d.Attempts), ""})
	}
	return p.table([]string{"DENIED", "BY", "PORT", "TIMES", "LAST"}, rows)
}

// count is a number in words of a table.
func count(n int64) string { return strconv.FormatInt(n, 10) }

// policyText is a policy on one line.
func policyText(n *client.NetworkPolicy) string {
	if n == nil {
		return string(api.NetworkPolicyModeNone)
	}
	text := string(n.Mode)
	if len(n.Allow) > 0 {
		text += " " + strings.Join(n.Allow, ", ")
	}
	if n.BandwidthMbit > 0 {
		text += fmt.Sprintf(", %d Mbit/s", n.BandwidthMbit)
	}
	return text
}
