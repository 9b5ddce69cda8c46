package server

import (
	"fmt"
	"net/http"

	"github.com/forkd/forkd/internal/keys"
	"github.com/forkd/forkd/internal/sandbox"
)

// access is what a route asks of who calls it. The zero value lets nobody in: a route that forgets to say is of no use.
type access string

// What routes ask for; x-forkd-access in api/openapi.yaml has the same words.
const (
	accessOpen      access = "open"       // nothing
	accessRead      access = "read"       // a key, or whoever else is known
	accessRun       access = "run"        //
	accessAdmin     access = "admin"      // of a tenant
	accessHostRead  access = "host-read"  // what is about all tenants: read, of the default tenant
	accessHostAdmin access = "host-admin" // administrators of the host: admin, of the default tenant
)

// allowed says whether somebody may use a route; the error names what is missing. Nothing but the route and the key decides: whether what is
// asked about exists does not show.
func (a access) allowed(who principal) error {
	need, host := keys.Scope(a), false
	switch a {
	case accessOpen:
		return nil
	case accessHostRead:
		need, host = keys.Read, true
	case accessHostAdmin:
		need, host = keys.Admin, true
	}
	switch {
	case !who.scope.Covers(need):
		return &sandbox.Error{Code: codeForbidden, Message: fmt.Sprintf("%s may %s: this needs %s", who.name, scopeText(who.scope), need),
			Hint: "use a key of that scope: `forkd key create --scope " + string(need) + "`"}
	case host && who.tenant != sandbox.DefaultTenant:
		return &sandbox.Error{Code: codeForbidden, Message: fmt.Sprintf("%s is of tenant %s: this is for the host's own, the default tenant", who.name, who.tenant),
			Hint: "ask who runs the daemon"}
	}
	return nil
}

func scopeText(s keys.Scope) string {
	if s == "" {
		return "do nothing"
	}
	return "only " + string(s)
}

// admit lets a request into a route, or answers why not.
func (a access) admit(next handler) handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		if err := a.allowed(noteOf(r.Context()).who); err != nil {
			return err
		}
		return next(w, r)
	}
}
