package image

import (
	"fmt"
	"net/url"
	"regexp"
	"slices"
)

// BuildSpec says what to build. Empty fields have defaults.
type BuildSpec struct {
	Name string
	// Packages are Debian packages on top of the default ones ("name", "name:arch" or "name=version").
	Packages []string
	Suite    string // Debian suite; default bookworm
	Mirror   string // URL of a Debian mirror; default: the tools' own
	Kernel   string // a bzImage; default: Debian's cloud kernel
	Modules  string // directory of the kernel's modules; only with Kernel; empty: all is built in
	// Rootfs is a root file system to take as it is, instead of Debian packages: an erofs, squashfs or ext4 image, a tar archive, or
	// a directory.
	Rootfs string
	Python bool // Rootfs has a python3, where that can't be seen: in an image file
	Force  bool // build from scratch even when nothing changed and a cached root file system exists
}

// Defaults of a build.
const DefaultSuite = "bookworm"

// basePackages are in every image built from Debian packages.
var basePackages = []string{"bash", "ca-certificates", "curl", "git", "python3", "sudo"}

var (
	packageRE = regexp.MustCompile(`^[a-z0-9][a-z0-9+.-]*(:[a-z0-9]+)?(=[A-Za-z0-9.+:~-]+)?$`)
	suiteRE   = regexp.MustCompile(`^[a-z][a-z0-9-]*$`)
)

// normalise checks a specification and fills in the defaults.
func (s BuildSpec) normalise() (BuildSpec, error) {
	if err := checkName(s.Name); err != nil {
		return s, err
	}
	if s.Modules != "" && s.Kernel == "" {
		return s, fmt.Errorf("%w: modules are given without the kernel they belong to: give both", ErrInvalid)
	}
	if s.Rootfs != "" {
		if len(s.Packages) > 0 || s.Suite != "" || s.Mirror != "" {
			return s, fmt.Errorf("%w: packages, suite and mirror can't be combined with a root file system of one's own", ErrInvalid)
		}
		return s, nil
	}
	if s.Suite == "" {
		s.Suite = DefaultSuite
	}
	if !suiteRE.MatchString(s.Suite) {
		return s, fmt.Errorf("%w: suite %q: give a name such as bookworm", ErrInvalid, s.Suite)
	}
	if s.Mirror != "" {
		u, err := url.Parse(s.Mirror)
		if err != nil || !slices.Contains([]string{"http", "https", "file", "copy"}, u.Scheme) {
			return s, fmt.Errorf("%w: mirror %q: give an http, https, file or copy URL", ErrInvalid, s.Mirror)
		}
	}
	for _, p := range s.Packages {
		if !packageRE.MatchString(p) {
			return s, fmt.Errorf("%w: package %q: give the name of a Debian package", ErrInvalid, p)
		}
	}
	s.Packages = append(slices.Clone(basePackages), s.Packages...)
	slices.Sort(s.Packages)
	s.Packages = slices.Compact(s.Packages)
	return s, nil
}
