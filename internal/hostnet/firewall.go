package hostnet

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
)

// Closed are the chains of other programs in which packets that the host passes on are dropped unless a rule accepts them, and no rule there, nor
// in a chain of that table, names our devices. Our own rules can't open what such a chain drops: in netfilter every table has a say.
func Closed() ([]string, error) {
	conn, err := nftables.New()
	if err != nil {
		return nil, fmt.Errorf("nftables: %w", err)
	}
	var closed []string
	for _, family := range []nftables.TableFamily{nftables.TableFamilyIPv4, nftables.TableFamilyINet} {
		chains, err := conn.ListChainsOfTableFamily(family)
		if err != nil {
			return nil, fmt.Errorf("chains of nftables: %w", err)
		}
		for _, c := range chains {
			if !drops(c) {
				continue
			}
			opened, err := opens(conn, chains, c.Table)
			if err != nil {
				return nil, err
			}
			if !opened {
				closed = append(closed, fmt.Sprintf("%s %s %s", familyName(family), c.Table.Name, c.Name))
			}
		}
	}
	return closed, nil
}

func familyName(f nftables.TableFamily) string {
	if f == nftables.TableFamilyINet {
		return "inet"
	}
	return "ip"
}

// drops says whether a chain drops what is passed on and no rule accepts.
func drops(c *nftables.Chain) bool {
	return c.Hooknum != nil && *c.Hooknum == *nftables.ChainHookForward && c.Policy != nil && *c.Policy == nftables.ChainPolicyDrop &&
		!strings.HasPrefix(c.Table.Name, tableName)
}

// opens says whether a table has a rule about our devices.
func opens(conn *nftables.Conn, chains []*nftables.Chain, t *nftables.Table) (bool, error) {
	for _, c := range chains {
		if c.Table.Name != t.Name {
			continue
		}
		rules, err := conn.GetRules(t, c)
		if err != nil {
			return false, fmt.Errorf("rules of %s %s: %w", t.Name, c.Name, err)
		}
		if slices.ContainsFunc(rules, namesOurs) {
			return true, nil
		}
	}
	return false, nil
}

// namesOurs says whether a rule is about devices that come from us by the beginning of their name.
func namesOurs(r *nftables.Rule) bool {
	byName := false
	for _, e := range r.Exprs {
		switch e := e.(type) {
		case *expr.Meta:
			byName = byName || e.Key == expr.MetaKeyIIFNAME
		case *expr.Cmp:
			if byName && e.Op == expr.CmpOpEq && bytes.HasPrefix(e.Data, []byte(hostPrefix)) {
				return true
			}
		}
	}
	return false
}
