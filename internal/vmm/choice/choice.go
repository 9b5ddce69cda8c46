// Package choice is an engine that is the first one of several that this host can run. Which one that is is found out once, at the first
// use, and stays: a daemon has one engine for its life.
package choice

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"

	"github.com/forkd/forkd/internal/vmm"
)

// Candidate is an engine with its name.
type Candidate struct {
	Name   string
	Engine vmm.Engine
}

// Engine is the first of its candidates that is available.
type Engine struct {
	candidates []Candidate
	log        *slog.Logger

	mu     sync.Mutex
	chosen vmm.Engine // nil until chosen
}

var _ vmm.Engine = (*Engine)(nil)

// New returns an engine that is one of the candidates, the best first. A nil log drops why others were not chosen.
func New(log *slog.Logger, candidates ...Candidate) *Engine {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &Engine{candidates: candidates, log: log}
}

// choose probes the candidates until one is available. None is remembered when a probe was cut short.
func (e *Engine) choose(ctx context.Context) (vmm.Engine, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.chosen != nil {
		return e.chosen, nil
	}
	var errs []error
	for _, c := range e.candidates {
		_, err := c.Engine.Probe(ctx)
		if err == nil {
			e.chosen = c.Engine
			return c.Engine, nil
		}
		if !errors.Is(err, vmm.ErrUnavailable) || ctx.Err() != nil {
			return nil, err
		}
		e.log.Info("an engine is not used", "engine", c.Name, "why", err)
		errs = append(errs, fmt.Errorf("%s: %w", c.Name, err))
	}
	return nil, errors.Join(errs...)
}

// Probe implements vmm.Engine.
func (e *Engine) Probe(ctx context.Context) (vmm.Info, error) {
	engine, err := e.choose(ctx)
	if err != nil {
		return vmm.Info{}, err
	}
	return engine.Probe(ctx)
}

// Boot implements vmm.Engine.
func (e *Engine) Boot(ctx context.Context, cfg vmm.BootConfig) (vmm.Machine, error) {
	engine, err := e.choose(ctx)
	if err != nil {
		return nil, err
	}
	return engine.Boot(ctx, cfg)
}

// Prepare implements vmm.Engine.
func (e *Engine) Prepare(ctx context.Context, cfg vmm.PrepareConfig) (vmm.Prepared, error) {
	engine, err := e.choose(ctx)
	if err != nil {
		return nil, err
	}
	return engine.Prepare(ctx, cfg)
}

// Attach implements vmm.Engine.
func (e *Engine) Attach(ctx context.Context, p vmm.Process) (vmm.Machine, error) {
	engine, err := e.choose(ctx)
	if err != nil {
		return nil, err
	}
	return engine.Attach(ctx, p)
}
