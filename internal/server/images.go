package server

import (
	"net/http"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/internal/image"
)

func (s *Server) listImages(w http.ResponseWriter, r *http.Request) error {
	list, err := s.images(r)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, mapped(list, imageInfo))
	return nil
}

// images lists what can be read. A damaged image must not hide the others.
func (s *Server) images(r *http.Request) ([]Image, error) {
	list, err := s.Images.List(r.Context())
	if err == nil || len(list) == 0 {
		return list, err
	}
	s.Log.Warn("some images can't be read", "request_id", requestID(r.Context()), "error", err)
	return list, nil
}

func (s *Server) getImage(w http.ResponseWriter, r *http.Request) error {
	name, err := imageName(r)
	if err != nil {
		return err
	}
	img, err := s.Images.Get(r.Context(), name)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, imageInfo(img))
	return nil
}

func (s *Server) deleteImage(w http.ResponseWriter, r *http.Request) error {
	name, err := imageName(r)
	if err != nil {
		return err
	}
	if err := s.Images.Remove(r.Context(), name); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) pruneImages(w http.ResponseWriter, r *http.Request) error {
	removed, err := s.Images.Prune(r.Context())
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, api.PruneResult{Removed: mapped(removed, func(i image.Image) api.ImageInfo { return imageInfo(Image{Image: i}) })})
	return nil
}

func (s *Server) buildImage(w http.ResponseWriter, r *http.Request) error {
	var req api.ImageBuildRequest
	if err := decode(w, r, maxBody, &req, "name"); err != nil {
		return err
	}
	if !namePattern.MatchString(req.Name) {
		return invalid(nameHint, "the image name %q can't be used", req.Name)
	}
	out := newStream(w, r, req.Stream)
	spec := image.BuildSpec{Name: req.Name, Packages: req.Packages, Suite: req.Suite, Mirror: req.Mirror,
		Kernel: req.Kernel, Modules: req.Modules, Rootfs: req.Rootfs, Python: req.Python, Force: req.Force}
	img, err := s.Images.Build(r.Context(), spec, func(p image.Progress) {
		out.progress(api.ProgressEvent{Step: p.Step, Detail: p.Detail, Done: p.Done, Total: p.Total})
	})
	if err != nil {
		return out.fail(r, err)
	}
	info := imageInfo(Image{Image: img})
	out.finish(api.ProgressEvent{Image: &info}, info)
	return nil
}
