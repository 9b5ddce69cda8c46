package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/client"
)

type eventsCmd struct{}

// Help says when it ends.
func (c *eventsCmd) Help() string {
	return "Shows what changes, as it changes, until the daemon stops or Ctrl-C. With --json an event is one line."
}

// Run shows events.
func (c *eventsCmd) Run(p *program) error {
	cl, err := p.client()
	if err != nil {
		return err
	}
	stream, err := cl.Events(p.ctx)
	if err != nil {
		return err
	}
	defer stream.Close()
	p.say("listening")
	for event, err := range stream.All() {
		if err != nil {
			return err
		}
		if event.Kind == api.EventKindDropped {
			return errors.New("some events were missed: " + event.Reason)
		}
		if err := p.printEvent(event); err != nil {
			return err
		}
	}
	return nil
}

func (p *program) printEvent(e client.Event) error {
	line, err := json.Marshal(e)
	if err != nil {
		return fmt.Errorf("encode an event: %w", err)
	}
	if !p.cli.JSON {
		words := []string{time.UnixMilli(e.TimeUnixMS).Format(time.TimeOnly), strings.ReplaceAll(string(e.Kind), "_", " ")}
		for _, word := range []string{e.SandboxID, e.Tag, e.State, strings.ReplaceAll(string(e.Condition), "_", " "), strings.ReplaceAll(e.Reason, "\n", " ")} {
			if word != "" {
				words = append(words, word)
			}
		}
		line = []byte(strings.Join(words, "  "))
	}
	return p.lines([]string{string(line)})
}
