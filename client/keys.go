package client

import (
	"context"
	"net/http"
	"net/url"

	"github.com/forkd/forkd/api"
)

// Key is an API key without its secret.
type Key = api.KeyInfo

// KeyRequest says what key to make.
type KeyRequest = api.KeyRequest

// KeyScope is what a key is good for: "read", "run" or "admin".
type KeyScope = api.KeyScope

// NewKey is a key with its secret, which is known here and nowhere else.
type NewKey = api.NewKey

// Keys lists the keys of the caller's tenant, oldest first; to the host's administrators those of all tenants.
func (c *Client) Keys(ctx context.Context) ([]Key, error) {
	var list []Key
	err := c.call(ctx, http.MethodGet, "/v1/keys", nil, &list)
	return list, err
}

// CreateKey makes a key.
//
//	made, err := c.CreateKey(ctx, client.KeyRequest{Name: "ci", Scope: "run", Tenant: "acme"})
func (c *Client) CreateKey(ctx context.Context, req KeyRequest) (NewKey, error) {
	var made NewKey
	err := c.call(ctx, http.MethodPost, "/v1/keys", req, &made)
	return made, err
}

// RevokeKey makes a key good for nothing, at once.
func (c *Client) RevokeKey(ctx context.Context, id string) error {
	return c.call(ctx, http.MethodDelete, "/v1/keys/"+url.PathEscape(id), nil, nil)
}

// ShareSnapshot lets all tenants fork a snapshot of the default tenant, or no longer.
func (c *Client) ShareSnapshot(ctx context.Context, tag string, public bool) error {
	return c.call(ctx, http.MethodPut, "/v1/snapshots/"+url.PathEscape(tag)+"/sharing", api.SharingRequest{Public: public}, nil)
}

// ShareImage lets all tenants use an image, or no longer.
func (c *Client) ShareImage(ctx context.Context, name string, public bool) error {
	return c.call(ctx, http.MethodPut, "/v1/images/"+url.PathEscape(name)+"/sharing", api.SharingRequest{Public: public}, nil)
}
