package main

import (
	"bytes"
	"strings"
	"testing"
)

func TestAuditFilesAreACount(t *testing.T) {
	dir := t.TempDir()
	args := []string{"serve", "--listen", "", "--networking", "off", "--data", dir + "/data", "--run", dir + "/run", "--cache", dir + "/cache", "--audit-files=-1"}
	var out, errs bytes.Buffer
	if code := run(t.Context(), args, strings.NewReader(""), &out, &errs, nil, fakeParts()); code != exitUsage || !strings.Contains(errs.String(), "--audit-files -1") {
		t.Errorf("exit code %d, %q, want %d and the flag", code, errs.String(), exitUsage)
	}
}
