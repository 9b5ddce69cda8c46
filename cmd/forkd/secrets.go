package main

import (
	"fmt"
	"io"
	"os"
	"strings"
)

// readSecrets reads those values that stand elsewhere: @FILE, and @- for standard input. What stands on a command line others on the host can read.
func (p *program) readSecrets(given map[string]string) (map[string]string, error) {
	if len(given) == 0 {
		return nil, nil
	}
	out := make(map[string]string, len(given))
	input := ""
	for name, value := range given {
		file, elsewhere := strings.CutPrefix(value, "@")
		var data []byte
		var err error
		switch {
		case !elsewhere:
			out[name] = value
			continue
		case file == "-" && input != "":
			return nil, badUsage("read one of them from a file", "the secrets %s and %s can't both be on standard input", input, name)
		case file == "-":
			input = name
			data, err = io.ReadAll(p.stdin)
		default:
			data, err = os.ReadFile(file)
		}
		if err != nil {
			return nil, fmt.Errorf("secret %s: %w", name, err)
		}
		out[name] = string(data)
	}
	return out, nil
}
