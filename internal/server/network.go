package server

import (
	"net/http"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/internal/netpolicy"
	"github.com/forkd/forkd/internal/sandbox"
)

func (s *Server) networkStatus(w http.ResponseWriter, r *http.Request) error {
	id, err := pathID(r)
	if err != nil {
		return err
	}
	return s.writeNetwork(w, r, id)
}

func (s *Server) setNetwork(w http.ResponseWriter, r *http.Request) error {
	id, err := pathID(r)
	if err != nil {
		return err
	}
	var body api.NetworkPolicy
	if err := decode(w, r, maxBody, &body, "mode"); err != nil {
		return err
	}
	policy, err := networkPolicy(&body)
	if err != nil {
		return err
	}
	if err := trust(r, policy); err != nil {
		return err
	}
	if _, err := s.Service.SetNetwork(r.Context(), id, *policy); err != nil {
		return err
	}
	return s.writeNetwork(w, r, id)
}

func (s *Server) writeNetwork(w http.ResponseWriter, r *http.Request, id string) error {
	status, err := s.Service.NetworkStatus(r.Context(), id)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, networkInfo(id, status))
	return nil
}

// networkPolicy checks a policy; nil when none is asked for.
func networkPolicy(b *api.NetworkPolicy) (*netpolicy.Policy, error) {
	if b == nil {
		return nil, nil
	}
	p := netpolicy.Policy{Mode: netpolicy.Mode(b.Mode), Rules: b.Allow, BandwidthMbit: b.BandwidthMbit}
	if !b.Mode.Valid() {
		return nil, invalid("use none, allow or open", "the network mode %q is not known", shorten(string(b.Mode)))
	}
	if _, err := p.Parse(); err != nil {
		return nil, invalid(`a rule is a domain, *.DOMAIN, an IPv4 address or CIDR, with :PORT, :LOW-HIGH, and /tcp or /udp`, "%v", err)
	}
	return &p, nil
}

// trust notes in a policy that who asks for it may open what is protected, or refuses one that would.
func trust(r *http.Request, p *netpolicy.Policy) error {
	if p == nil {
		return nil
	}
	err := accessHostAdmin.allowed(noteOf(r.Context()).who)
	if err == nil {
		p.Privileged = true
		return nil
	}
	if rule := p.Named(); rule != "" {
		return &sandbox.Error{Code: codeForbidden, Message: "rule " + shorten(rule) + " opens what is protected", Err: err, Hint: "ask who runs the daemon"}
	}
	return nil
}

// networkOf is a policy as it is shown.
func networkOf(p netpolicy.Policy) *api.NetworkPolicy {
	mode := api.NetworkPolicyMode(p.Mode)
	if p.IsNone() {
		mode = api.NetworkPolicyModeNone
	}
	return &api.NetworkPolicy{Mode: mode, Allow: p.Rules, BandwidthMbit: p.BandwidthMbit}
}

func networkInfo(id string, st netpolicy.Status) api.NetworkStatus {
	out := api.NetworkStatus{ID: id, Policy: *networkOf(st.Policy), DeniedAttempts: int64(st.DeniedAttempts), ForgedPackets: int64(st.ForgedPackets),
		Ipv6Packets: int64(st.IPv6Packets), MonitorPackets: int64(st.MonitorPackets), SentBytes: int64(st.SentBytes), ReceivedBytes: int64(st.ReceivedBytes),
		Denied: []api.DeniedAttempt{}, DeniedNames: []api.DeniedName{}}
	for _, d := range st.Denied {
		out.Denied = append(out.Denied, api.DeniedAttempt{Addr: d.Addr.String(), Proto: d.Proto, Port: int(d.Port), Attempts: int64(d.Attempts)})
	}
	for _, n := range st.DeniedNames {
		out.DeniedNames = append(out.DeniedNames, api.DeniedName{Name: n.Name, Count: int64(n.Count), LastUnix: n.Last.Unix()})
	}
	return out
}
