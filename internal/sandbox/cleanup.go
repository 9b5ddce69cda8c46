package sandbox

import "errors"

// cleanup undoes the steps of a multi-step creation, newest first. It is released when the creation succeeded.
type cleanup struct{ steps []func() error }

// add registers what undoes the step just made.
func (c *cleanup) add(undo func() error) { c.steps = append(c.steps, undo) }

// release keeps what was made.
func (c *cleanup) release() { c.steps = nil }

// run undoes everything; a step that fails doesn't stop the others. A second run does nothing.
func (c *cleanup) run() error {
	var errs []error
	for i := len(c.steps) - 1; i >= 0; i-- {
		errs = append(errs, c.steps[i]())
	}
	c.steps = nil
	return errors.Join(errs...)
}
