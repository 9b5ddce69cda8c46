// Package server is forkd's REST interface: it turns requests into calls of the domain, and its answers and errors into JSON.
//
// It is for what belongs to HTTP: routes, tokens, limits of bodies, strict decoding, idempotency keys, request ids, metrics,
// progress streams and a shutdown that lets requests finish. It is not for business rules: those are in internal/sandbox and
// internal/image, which it reaches through the interfaces Service and Images. The contract is api/openapi.yaml.
package server
