package main

import (
	"fmt"
	"os"
	"strings"
)

// readSecrets reads those values that stand in files: @FILE. What stands on a command line others on the host can read.
func readSecrets(given map[string]string) (map[string]string, error) {
	if len(given) == 0 {
		return nil, nil
	}
	out := make(map[string]string, len(given))
	for name, value := range given {
		if file, ok := strings.CutPrefix(value, "@"); ok {
			data, err := os.ReadFile(file)
			if err != nil {
				return nil, fmt.Errorf("secret %s: %w", name, err)
			}
			value = string(data)
		}
		out[name] = value
	}
	return out, nil
}
