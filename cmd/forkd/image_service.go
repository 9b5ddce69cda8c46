package main

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/forkd/forkd/internal/image"
	"github.com/forkd/forkd/internal/sandbox"
	"github.com/forkd/forkd/internal/server"
	"github.com/forkd/forkd/internal/store"
	"github.com/forkd/forkd/internal/transfer"
)

// imageService is the image store as the server wants it: who uses an image, and who may see it, is known to others.
type imageService struct {
	store    *image.Store
	db       *store.DB
	packs    *transfer.Service
	agentErr error // why there is no agent to put into images
}

// Build implements server.Images.
func (s *imageService) Build(ctx context.Context, spec image.BuildSpec, progress func(image.Progress)) (image.Image, error) {
	if s.agentErr != nil {
		return image.Image{}, fmt.Errorf("build image %s: %w", spec.Name, s.agentErr)
	}
	return s.store.Build(ctx, spec, progress)
}

// Get implements server.Images.
func (s *imageService) Get(ctx context.Context, nameOrID string) (server.Image, error) {
	img, err := s.store.Get(nameOrID)
	if err != nil {
		return server.Image{}, err
	}
	tenants, err := s.db.ImageTenants(ctx)
	if err != nil {
		return server.Image{}, err
	}
	if !sandbox.ImageSeenBy(sandbox.TenantOf(ctx), tenants[img.ID]) {
		return server.Image{}, fmt.Errorf("%w: %q", image.ErrNotFound, nameOrID) // as the store says it
	}
	return seen(img, tenants), nil
}

func seen(img image.Image, tenants map[string][]string) server.Image {
	return server.Image{Image: img, Public: slices.Contains(tenants[img.ID], store.Everybody)}
}

// List implements server.Images.
func (s *imageService) List(ctx context.Context) ([]server.Image, error) {
	list, damaged := s.store.List()
	tenants, err := s.db.ImageTenants(ctx)
	if err != nil {
		return nil, err
	}
	var all []server.Image
	for _, img := range list {
		if sandbox.ImageSeenBy(sandbox.TenantOf(ctx), tenants[img.ID]) {
			all = append(all, seen(img, tenants))
		}
	}
	return all, damaged
}

// Share implements server.Images.
func (s *imageService) Share(ctx context.Context, nameOrID string, public bool) (server.Image, error) {
	img, err := s.Get(ctx, nameOrID)
	if err != nil {
		return img, err
	}
	if public {
		err = s.db.ShareImage(ctx, img.ID, store.Everybody, sandbox.TenantOf(ctx))
	} else {
		err = s.db.UnshareImage(ctx, img.ID, store.Everybody)
	}
	if err != nil {
		return server.Image{}, err
	}
	return s.Get(ctx, img.ID)
}

// Remove implements server.Images.
func (s *imageService) Remove(ctx context.Context, nameOrID string) error {
	img, err := s.Get(ctx, nameOrID)
	if err != nil && !errors.Is(err, image.ErrCorrupt) {
		return err
	}
	if err := s.packs.RemoveImage(nameOrID); err != nil || img.ID == "" {
		return err
	}
	return s.db.ForgetImage(context.WithoutCancel(ctx), img.ID)
}

// Prune implements server.Images.
func (s *imageService) Prune(ctx context.Context) ([]image.Image, error) {
	removed, err := s.packs.PruneImages()
	for _, img := range removed {
		err = errors.Join(err, s.db.ForgetImage(context.WithoutCancel(ctx), img.ID))
	}
	return removed, err
}
