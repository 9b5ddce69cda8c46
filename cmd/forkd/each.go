package main

import "fmt"

// each does something to every name, tells of each failure at once, goes on with the others, and prints what was done.
func (p *program) each(names []string, done string, do func(name string) error) error {
	ok := []string{}
	code := exitOK
	for _, name := range names {
		if err := do(name); err != nil {
			if failed := p.fail(fmt.Errorf("%s: %w", name, err)); code == exitOK {
				code = failed
			}
			if p.ctx.Err() != nil || code == exitNoDaemon {
				break
			}
			continue
		}
		ok = append(ok, name)
	}
	var err error
	if p.cli.JSON {
		err = p.printJSON(map[string][]string{done: ok})
	} else {
		err = p.lines(ok)
	}
	if err == nil && code != exitOK {
		return &codedError{code: code}
	}
	return err
}
