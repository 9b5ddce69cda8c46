// Package guide holds the guides that tests follow to the letter, so that what they say is tried.
package guide

import _ "embed"

// Firecracker is "Firecracker on your own KVM host".
//
//go:embed firecracker.md
var Firecracker string
