package main

import (
	"fmt"
	"path/filepath"

	"github.com/forkd/forkd/internal/audit"
)

type auditCmd struct {
	Verify auditVerifyCmd `cmd:"" help:"Check that no line of the record was changed, dropped or moved."`
}

type auditVerifyCmd struct {
	Dir  string `arg:"" optional:"" placeholder:"DIR" help:"Directory of the record. Default: audit in the daemon's data directory."`
	Head string `placeholder:"SHA256" help:"The digest of a line that was noted elsewhere, as this command prints it: the record must have that line."`
}

// Help says what the record can and can't show.
func (c *auditVerifyCmd) Help() string {
	return "Every line has the digest of the line before it. Who can write to the directory can make all of it anew: note the head that this prints " +
		"somewhere else from time to time, and give it with --head."
}

// Run verifies a record on this host. The daemon may be running.
func (c *auditVerifyCmd) Run(p *program) error {
	dir := c.Dir
	if dir == "" {
		var f daemonFlags
		if err := f.fillDefaults(p.getenv); err != nil {
			return err
		}
		dir = filepath.Join(f.Data, auditDir)
	}
	r, err := audit.Verify(dir, audit.VerifyOptions{Head: c.Head})
	if err != nil {
		return err
	}
	if p.cli.JSON {
		err = p.printJSON(r)
	} else {
		for _, problem := range r.Problems {
			p.say("%s line %d: %s", problem.File, problem.Line, problem.What)
		}
		err = p.facts([][2]string{{"lines", fmt.Sprintf("%d, numbers %d to %d, in %d files", r.Lines, r.First, r.Last, r.Files)}, {"head", r.Head}})
	}
	if err == nil && len(r.Problems) > 0 {
		return &codedError{code: exitError, err: fmt.Errorf("audit record %s: %d lines are not as they were written", dir, len(r.Problems)),
			hint: "compare it with a copy that was kept elsewhere"}
	}
	return err
}
