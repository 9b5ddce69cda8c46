// Package systemd holds the units that distributions install, for the tests that install them.
package systemd

import _ "embed"

// Service is forkd.service.
//
//go:embed forkd.service
var Service string
