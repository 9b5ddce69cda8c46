// Package api is the reviewed contract of forkd's REST interface: the OpenAPI document, and the Go types generated from it.
//
// It is for the server, the client and tests that hold them to the document. It has no behaviour: handlers are in
// internal/server, requests in client.
package api

import _ "embed"

//go:generate go tool oapi-codegen -config oapi-codegen.yaml openapi.yaml

// Spec is the OpenAPI document, in YAML.
//
//go:embed openapi.yaml
var Spec []byte
