package transfer

import (
	"sync"
	"time"

	"github.com/forkd/forkd/internal/image"
	"github.com/forkd/forkd/internal/sandbox"
)

// holds are the images that packs on their way in or out need, and that no snapshot may need yet or any more.
type holds struct {
	mu    sync.Mutex
	count map[string]int // by id
}

func (h *holds) take(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.count[id]++
}

func (h *holds) give(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.count[id]--; h.count[id] == 0 {
		delete(h.count, id)
	}
}

// parts is the image store as one pack sees it: what it looks at is held until release.
func (s *Service) parts() *imageParts { return &imageParts{store: s.images, holds: &s.holds} }

// RemoveImage removes an image that nothing needs.
func (s *Service) RemoveImage(nameOrID string) error {
	s.holds.mu.Lock() // what is not in use stays so until it is gone
	defer s.holds.mu.Unlock()
	return s.images.Remove(nameOrID, s.imageInUse)
}

// youngImage is the age at which an image without a name is a leftover, and not one that is about to get its name.
const youngImage = time.Minute

// PruneImages removes the images that have lost their name to a newer one and that nothing needs.
func (s *Service) PruneImages() ([]image.Image, error) {
	s.holds.mu.Lock()
	defer s.holds.mu.Unlock()
	return s.images.Prune(youngImage, s.imageInUse)
}

// imageInUse reports by an error who needs an image. Preconditions: s.holds.mu is held.
func (s *Service) imageInUse(id string) error {
	if s.holds.count[id] > 0 {
		return &sandbox.Error{Code: sandbox.CodeImageInUse, Message: "image " + id + " is being packed or unpacked", Hint: "wait until that is done"}
	}
	return s.domain.ImageInUse(id)
}
