package image

import "time"

// Prune removes the images without a name that inUse has nothing against, and returns them: what builds under the same names left. With
// them goes their disk space, where it isn't shared with a newer image. Those that are younger than keep are left alone.
func (s *Store) Prune(keep time.Duration, inUse func(id string) error) ([]Image, error) {
	list, listErr := s.List()
	if listErr != nil && len(list) == 0 {
		return nil, listErr
	}
	removed := []Image{}
	for _, img := range list {
		if img.Name != "" || time.Since(img.CreatedAt) < keep || inUse(img.ID) != nil {
			continue
		}
		if err := s.RemoveID(img.ID); err != nil {
			return removed, err
		}
		removed = append(removed, img)
	}
	return removed, nil
}
