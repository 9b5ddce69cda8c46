package main

import (
	"fmt"
	"os"
	"testing"
)

func TestPassedListenerIsForUs(t *testing.T) {
	for name, env := range map[string]map[string]string{
		"nothing":        {},
		"another's":      {"LISTEN_PID": "1", "LISTEN_FDS": "1"},
		"none":           {"LISTEN_PID": fmt.Sprint(os.Getpid()), "LISTEN_FDS": "0"},
		"what is no pid": {"LISTEN_PID": "x", "LISTEN_FDS": "1"},
	} {
		if l, err := passedListener(func(k string) string { return env[k] }); l != nil || err != nil {
			t.Errorf("%s: %v, %v, want none", name, l, err)
		}
	}
	several := map[string]string{"LISTEN_PID": fmt.Sprint(os.Getpid()), "LISTEN_FDS": "2"}
	if _, err := passedListener(func(k string) string { return several[k] }); err == nil {
		t.Error("several sockets are taken")
	}
}
