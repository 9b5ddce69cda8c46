package server

import (
	"fmt"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/forkd/forkd/internal/sandbox"
)

const nameHint = "use 1 to 64 of A-Z a-z 0-9 _ and -"

var (
	namePattern = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)
	idPattern   = regexp.MustCompile(`^[a-z0-9]{1,64}$`)
)

const (
	maxExecTimeout = 24 * time.Hour
	maxLife        = 10 * 365 * 24 * time.Hour
	maxOutput      = 8 << 20
	maxSize        = 1 << 20 // of MiB, of pools: larger numbers are mistakes
)

func checkTag(tag string) error {
	if namePattern.MatchString(tag) {
		return nil
	}
	return &sandbox.Error{Code: sandbox.CodeInvalidTag, Message: fmt.Sprintf("the tag %q can't be used", shorten(tag)), Hint: nameHint}
}

// shorten keeps an answer readable that quotes what a client sent.
func shorten(s string) string {
	if len(s) <= 100 {
		return s
	}
	return s[:100] + "…"
}

func pathTag(r *http.Request) (string, error) {
	tag := r.PathValue("tag")
	return tag, checkTag(tag)
}

func pathID(r *http.Request) (string, error) {
	id := r.PathValue("id")
	if !idPattern.MatchString(id) {
		return "", invalid("an id is made of a-z and 0-9, as POST /v1/sandboxes answers it", "%q is not the id of a sandbox", shorten(id))
	}
	return id, nil
}

func checkName(name string) error {
	if !namePattern.MatchString(name) {
		return invalid(nameHint, "the name %q can't be used", shorten(name))
	}
	return nil
}

func memoryLimit(mib *int) (int, error) {
	if mib == nil {
		return 0, nil
	}
	return *mib, between("memory_limit_mib", *mib, 0, maxSize)
}

func imageName(r *http.Request) (string, error) {
	name := r.PathValue("name")
	if !namePattern.MatchString(name) {
		return "", invalid(nameHint, "%q is not the name or id of an image", shorten(name))
	}
	return name, nil
}

// flag reads a boolean of the query; its name alone means true.
func flag(r *http.Request, name string) (bool, error) {
	query := r.URL.Query()
	if !query.Has(name) {
		return false, nil
	}
	noteQuery(r, name)
	if query.Get(name) == "" {
		return true, nil
	}
	v, err := strconv.ParseBool(query.Get(name))
	if err != nil {
		return false, invalid("use true or false", "%s=%q is not a boolean", name, shorten(query.Get(name)))
	}
	return v, nil
}

// duration reads a number of seconds.
func duration(field string, secs float64, most time.Duration) (time.Duration, error) {
	if secs < 0 || secs > most.Seconds() {
		return 0, invalid("", "field %q is %v: it must be from 0 to %.0f seconds", field, secs, most.Seconds())
	}
	return time.Duration(secs * float64(time.Second)), nil
}

// execTimeout reads the published timeout of exec and eval: 30 seconds unless told otherwise.
func execTimeout(secs *float64) (time.Duration, error) {
	if secs == nil {
		return 30 * time.Second, nil
	}
	d, err := duration("timeout_secs", *secs, maxExecTimeout)
	if err == nil && d == 0 {
		d = maxExecTimeout
	}
	return d, err
}

func between(field string, v, least, most int) error {
	if v < least || v > most {
		return invalid("", "field %q is %d: it must be from %d to %d", field, v, least, most)
	}
	return nil
}

func checkEnv(env map[string]string) error {
	for name, value := range env {
		if name == "" || strings.ContainsAny(name, "=\x00") || strings.Contains(value, "\x00") {
			return invalid("a name has no =, and neither it nor the value has a NUL byte", "the environment variable %q can't be set", shorten(name))
		}
	}
	return nil
}
