package snapshot

import (
	"context"
	"fmt"
	"time"
)

// Compact makes a self-contained snapshot newID of id and what it rests on. Memory is verified while it is read; id stays as it is.
func (s *Store) Compact(ctx context.Context, id, newID string) (Manifest, error) {
	chain, err := s.Chain(id)
	if err != nil {
		return Manifest{}, err
	}
	m := chain[len(chain)-1]
	st, err := s.Stage(newID)
	if err != nil {
		return Manifest{}, fmt.Errorf("compact snapshot %s: %w", id, err)
	}
	defer st.Abort()
	img, err := s.Load(ctx, id)
	if err != nil {
		return Manifest{}, err
	}
	defer img.Close()
	if err := st.WriteImage(ctx, img); err != nil {
		return Manifest{}, fmt.Errorf("compact snapshot %s: %w", id, err)
	}
	device, err := s.readDevice(m)
	if err != nil {
		return Manifest{}, err
	}
	if err := st.do("write device state", func() error { return st.writeDevice(ctx, device) }); err != nil {
		return Manifest{}, fmt.Errorf("compact snapshot %s: %w", id, err)
	}
	m.Parent, m.CreatedAt = "", time.Time{}
	return st.Publish(ctx, m)
}
