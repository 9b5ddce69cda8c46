package main

import (
	"runtime"
	"runtime/debug"

	"github.com/forkd/forkd/api"
)

// version is set by the build (-ldflags -X main.version=…).
var version = "dev"

type versionCmd struct {
	Client bool `help:"Don't ask the daemon."`
}

// Run prints both versions; that no daemon answers is no error here.
func (c *versionCmd) Run(p *program) error {
	out := struct {
		Client api.Version  `json:"client"`
		Daemon *api.Version `json:"daemon"`
	}{Client: ownVersion()}
	if !c.Client {
		if cl, err := p.client(); err == nil {
			if v, err := cl.Version(p.ctx); err == nil {
				out.Daemon = &v
			}
		}
	}
	if p.cli.JSON {
		return p.printJSON(out)
	}
	daemon := ""
	if out.Daemon != nil {
		daemon = out.Daemon.Version + " (API " + string(out.Daemon.API) + ")"
	} else if !c.Client {
		daemon = "does not answer"
	}
	return p.facts([][2]string{{"forkd", out.Client.Version}, {"commit", out.Client.Commit}, {"go", out.Client.Go}, {"daemon", daemon}})
}

func ownVersion() api.Version {
	v := api.Version{Version: version, API: api.VersionAPIV1, Go: runtime.Version()}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" && len(s.Value) >= 12 {
				v.Commit = s.Value[:12]
			}
		}
	}
	return v
}
