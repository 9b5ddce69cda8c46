package agent

import (
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// baseEnv is the environment of a command before the identity's and the request's.
func baseEnv(u *user) []string {
	return []string{"PATH=" + defaultPath, "LANG=C.UTF-8", "HOME=" + u.home, "USER=" + u.name, "LOGNAME=" + u.name, "SHELL=" + u.shell}
}

// secretsDir has the secrets of a sandbox, each a file of that name. A file .env says that commands get them in their environment too: they are read
// when one starts, and not kept.
const secretsDir = "/run/forkd/secrets/"

// secretEnv are the secrets that commands are to have in their environment.
func secretEnv() []string {
	var st unix.Stat_t
	if unix.Stat(secretsDir+".env", &st) != nil {
		return nil
	}
	names, err := readDir(secretsDir)
	if err != nil {
		return nil
	}
	var out []string
	for _, name := range names {
		if name[0] == '.' {
			continue
		}
		if value, err := readFile(secretsDir + name); err == nil {
			out = append(out, name+"="+string(value))
		}
	}
	return out
}

// mergeEnv joins lists of K=V; the last value of a name counts.
func mergeEnv(lists ...[]string) []string {
	var out []string
	at := make(map[string]int)
	for _, list := range lists {
		for _, kv := range list {
			k, _, _ := strings.Cut(kv, "=")
			if i, ok := at[k]; ok {
				out[i] = kv
				continue
			}
			at[k] = len(out)
			out = append(out, kv)
		}
	}
	return out
}

// getEnv returns the value of a name, "" when it is not there.
func getEnv(env []string, name string) string {
	for _, kv := range env {
		if k, v, ok := strings.Cut(kv, "="); ok && k == name {
			return v
		}
	}
	return ""
}

// badEnv returns the first entry that is no K=V.
func badEnv(env []string) (string, bool) {
	for _, kv := range env {
		if i := strings.IndexByte(kv, '='); i <= 0 || strings.IndexByte(kv, 0) >= 0 {
			return kv, true
		}
	}
	return "", false
}

// lookPath finds the file of a command as a shell would: a name with a slash is relative to cwd, another one is searched on path.
// The errors are ENOENT and EACCES.
func lookPath(name, cwd, path string) (string, error) {
	if strings.Contains(name, "/") {
		if !filepath.IsAbs(name) {
			name = filepath.Join(cwd, name)
		}
		return name, executable(name)
	}
	result := error(unix.ENOENT)
	for _, dir := range strings.Split(path, ":") {
		if dir == "" {
			dir = "."
		}
		if !filepath.IsAbs(dir) {
			dir = filepath.Join(cwd, dir)
		}
		file := filepath.Join(dir, name)
		err := executable(file)
		if err == nil {
			return file, nil
		}
		if err == unix.EACCES {
			result = err
		}
	}
	return "", result
}

func executable(file string) error {
	var st unix.Stat_t
	if err := unix.Stat(file, &st); err != nil {
		if err == unix.EACCES {
			return err
		}
		return unix.ENOENT
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Mode&0o111 == 0 {
		return unix.EACCES
	}
	return nil
}

// findPython returns the interpreter for evals, "" when there is none.
func findPython(configured string) string {
	name := configured
	if name == "" {
		name = "python3"
	}
	file, err := lookPath(name, "/", defaultPath)
	if err != nil {
		return ""
	}
	return file
}
