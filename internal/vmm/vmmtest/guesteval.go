package vmmtest

import (
	"context"
	"encoding/binary"
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// The interpreter of a fake guest: integers, strings in quotes, names, `+`, `print(…)`, `random()`, `raise …`, `import …`, and
// `hang()`, which never returns. Its variables live in the guest's memory.

var (
	assignment = regexp.MustCompile(`^([A-Za-z_]\w*)\s*=\s*([^=].*)$`)
	identifier = regexp.MustCompile(`^[A-Za-z_]\w*$`)
	printing   = regexp.MustCompile(`^print\((.*)\)$`)
)

// eval runs code and returns the repr of its last expression, what it printed and its traceback.
func (g *guest) eval(ctx context.Context, code string) (result, stdout, failure string) {
	var out strings.Builder
	for _, line := range strings.FieldsFunc(code, func(r rune) bool { return r == ';' || r == '\n' }) {
		line = strings.TrimSpace(line)
		if line == "" {
			continue
		}
		var err error
		result, err = g.statement(ctx, line, &out)
		if err != nil {
			return "", out.String(), "Traceback (most recent call last):\n" + err.Error()
		}
	}
	return result, out.String(), ""
}

func (g *guest) statement(ctx context.Context, line string, out *strings.Builder) (string, error) {
	if strings.HasPrefix(line, "import ") || strings.HasPrefix(line, "from ") || line == "pass" {
		return "", nil
	}
	if why, ok := strings.CutPrefix(line, "raise "); ok {
		return "", fmt.Errorf("%s", why)
	}
	if line == "hang()" {
		<-ctx.Done()
		return "", context.Cause(ctx)
	}
	if m := printing.FindStringSubmatch(line); m != nil {
		value, err := g.expression(m[1])
		if err == nil {
			out.WriteString(strings.Trim(value, "'") + "\n")
		}
		return "", err
	}
	m := assignment.FindStringSubmatch(line)
	if m == nil {
		return g.expression(line)
	}
	value, err := g.expression(m[2])
	if err != nil {
		return "", err
	}
	ok := g.change(func(s *store) {
		if s.Vars == nil {
			s.Vars = map[string]string{}
		}
		s.Vars[m[1]] = value
	})
	if !ok {
		return "", fmt.Errorf("MemoryError")
	}
	return "", nil
}

// expression returns the repr of a sum.
func (g *guest) expression(text string) (string, error) {
	var sum string
	for i, part := range strings.Split(text, "+") {
		value, err := g.term(strings.TrimSpace(part))
		if err != nil {
			return "", err
		}
		if i == 0 {
			sum = value
			continue
		}
		if sum, err = add(sum, value); err != nil {
			return "", err
		}
	}
	return sum, nil
}

func (g *guest) term(text string) (string, error) {
	if _, err := strconv.Atoi(text); err == nil {
		return text, nil
	}
	if n := len(text); n >= 2 && (text[0] == '\'' || text[0] == '"') && text[n-1] == text[0] {
		return "'" + text[1:n-1] + "'", nil
	}
	if text == "random()" {
		b := g.draw(func(s *store) *generator { return &s.Interpreter })
		return strconv.FormatUint(binary.LittleEndian.Uint64(b[:])>>1, 10), nil
	}
	if !identifier.MatchString(text) {
		return "", fmt.Errorf("SyntaxError: invalid syntax: %s", text)
	}
	value, ok := g.view().Vars[text]
	if !ok {
		return "", fmt.Errorf("NameError: name '%s' is not defined", text)
	}
	return value, nil
}

func add(a, b string) (string, error) {
	x, errX := strconv.Atoi(a)
	y, errY := strconv.Atoi(b)
	switch {
	case errX == nil && errY == nil:
		return strconv.Itoa(x + y), nil
	case errX != nil && errY != nil:
		return "'" + strings.Trim(a, "'") + strings.Trim(b, "'") + "'", nil
	}
	return "", fmt.Errorf("TypeError: unsupported operand type(s) for +")
}
