package audit

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"unicode/utf8"
)

// What is left of a parameter.
const (
	maxText  = 512 // bytes of a string
	maxItems = 32  // of a list or an object
	maxDepth = 4
)

// secret says whether a field's value is never kept: only that it was there. Names are compared as readers of JSON do that don't mind their case, with
// its odd cases ("ſ" is an "s"): whoever writes Env means env.
func secret(name string) bool {
	for _, s := range []string{"env", "secrets", "token", "password"} {
		if strings.EqualFold(name, s) {
			return true
		}
	}
	return false
}

// Redact makes parameters of a request's JSON body: values of environments and secrets are left out, what a program would read is only counted,
// and long texts are cut. A body that is no JSON object is left out.
func Redact(body []byte) json.RawMessage {
	var fields map[string]any
	d := json.NewDecoder(bytes.NewReader(body))
	d.UseNumber()
	if d.Decode(&fields) != nil || len(fields) == 0 {
		return nil
	}
	out, err := json.Marshal(redactObject(fields, 0))
	if err != nil {
		return nil
	}
	return out
}

func redactObject(fields map[string]any, depth int) map[string]any {
	out := map[string]any{}
	for name, v := range fields {
		if len(out) == maxItems {
			out["…"] = fmt.Sprintf("%d fields", len(fields))
			break
		}
		switch m, isMap := v.(map[string]any); {
		case secret(name) && isMap:
			names := map[string]any{}
			for n := range m {
				if len(names) < maxItems {
					names[cut(n)] = "…"
				}
			}
			out[name] = names
		case secret(name):
			out[name] = "…"
		case strings.EqualFold(name, "stdin"):
			s, _ := v.(string)
			out[name] = fmt.Sprintf("%d bytes", len(s))
		default:
			out[cut(name)] = redact(v, depth+1)
		}
	}
	return out
}

func redact(v any, depth int) any {
	switch v := v.(type) {
	case string:
		return cut(v)
	case map[string]any:
		if depth >= maxDepth {
			return "…"
		}
		return redactObject(v, depth)
	case []any:
		if depth >= maxDepth {
			return "…"
		}
		out := make([]any, 0, min(len(v), maxItems))
		for _, item := range v[:min(len(v), maxItems)] {
			out = append(out, redact(item, depth+1))
		}
		if len(v) > maxItems {
			out = append(out, fmt.Sprintf("… %d in all", len(v)))
		}
		return out
	}
	return v
}

// cut shortens a text between two characters.
func cut(s string) string {
	if len(s) <= maxText {
		return s
	}
	n := maxText
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return fmt.Sprintf("%s… (%d bytes)", s[:n], len(s))
}
