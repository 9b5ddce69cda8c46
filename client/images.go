package client

import (
	"context"
	"net/http"
	"net/url"

	"github.com/forkd/forkd/api"
)

// Image is a root file system with its kernel.
type Image = api.ImageInfo

// ImageBuildRequest says what to build.
type ImageBuildRequest = api.ImageBuildRequest

// Images lists the images, the newest first.
func (c *Client) Images(ctx context.Context) ([]Image, error) {
	var list []Image
	err := c.call(ctx, http.MethodGet, "/v1/images", nil, &list)
	return list, err
}

// Image returns one image by name or id.
func (c *Client) Image(ctx context.Context, name string) (Image, error) {
	var img Image
	err := c.call(ctx, http.MethodGet, "/v1/images/"+url.PathEscape(name), nil, &img)
	return img, err
}

// BuildImage builds an image and calls progress (which may be nil) for each step. It takes minutes the first time.
//
//	img, err := c.BuildImage(ctx, client.ImageBuildRequest{Name: "py", Packages: []string{"python3-numpy"}}, nil)
func (c *Client) BuildImage(ctx context.Context, req ImageBuildRequest, progress func(Progress)) (Image, error) {
	last, err := c.stream(ctx, "/v1/images", req, progress)
	if err != nil {
		return Image{}, err
	}
	return *last.Image, nil
}

// PruneImages removes the images that have lost their name to a newer one and that no snapshot uses, and returns them.
func (c *Client) PruneImages(ctx context.Context) ([]Image, error) {
	var res api.PruneResult
	err := c.call(ctx, http.MethodPost, "/v1/images/prune", nil, &res)
	return res.Removed, err
}

// DeleteImage removes an image that no snapshot uses.
func (c *Client) DeleteImage(ctx context.Context, name string) error {
	return c.call(ctx, http.MethodDelete, "/v1/images/"+url.PathEscape(name), nil, nil)
}
