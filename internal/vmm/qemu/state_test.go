package qemu

import (
	"encoding/json"
	"strings"
	"testing"
)

// TestStagedCommand sends a command in two parts, the second of which is all that there is to do when it counts.
func TestStagedCommand(t *testing.T) {
	for name, tt := range map[string]struct{ answer, want string }{
		"done":    {`{"return": {}}`, ""},
		"refused": {`{"error": {"class": "GenericError", "desc": "the machine runs"}}`, "the machine runs"},
	} {
		t.Run(name, func(t *testing.T) {
			ours, theirs := pair(t)
			q := newMonitor(ours, func(string, json.RawMessage) {})
			defer q.close()
			set := fileSet{ID: 7}
			if err := q.stage(saveCommand, set.arguments()); err != nil {
				t.Fatal(err)
			}
			const whole = `{"execute":"xen-save-devices-state","arguments":{"filename":"/dev/fdset/7","live":false}}`
			ahead := make([]byte, 2*len(whole))
			n, err := theirs.Read(ahead)
			if err != nil || string(ahead[:n]) != whole[:len(whole)-1] {
				t.Errorf("staged: got %s, %v, want all but the last byte of %s", ahead[:n], err, whole)
			}
			go func() { // ends with the connection
				last := make([]byte, 2)
				if n, err := theirs.Read(last); err == nil && string(last[:n]) == "}" {
					_, _ = theirs.Write([]byte(tt.answer))
				}
			}()
			err = q.finish(t.Context(), saveCommand)
			if got := errorText(err); tt.want == "" && err != nil || !strings.Contains(got, tt.want) {
				t.Errorf("finish: got %q, want %q in it", got, tt.want)
			}
		})
	}
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
