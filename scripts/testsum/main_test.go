package main

import (
	"strings"
	"testing"
)

func TestSummarise(t *testing.T) {
	tests := []struct {
		name   string
		in     []string
		want   []string // in the output
		absent []string
		failed bool
	}{
		{
			name: "pass is one line without output",
			in: []string{
				`{"Action":"output","Package":"p","Test":"TestA","Output":"noise\n"}`,
				`{"Action":"pass","Package":"p","Test":"TestA"}`,
				`{"Action":"pass","Package":"p","Elapsed":1.25}`,
			},
			want:   []string{"ok    p  1 tests, 1.2 s"},
			absent: []string{"noise", "skipped"},
		},
		{
			name: "skip gives its reason",
			in: []string{
				`{"Action":"output","Package":"p","Test":"TestA","Output":"=== RUN   TestA\n"}`,
				`{"Action":"output","Package":"p","Test":"TestA","Output":"    a_test.go:7: needs root\n"}`,
				`{"Action":"output","Package":"p","Test":"TestA","Output":"--- SKIP: TestA (0.00s)\n"}`,
				`{"Action":"skip","Package":"p","Test":"TestA"}`,
			},
			want: []string{"skipped (1):", "p TestA: needs root"},
		},
		{
			name: "skipped at first and run later is not skipped",
			in: []string{
				`{"Action":"skip","Package":"p","Test":"TestA"}`,
				`{"Action":"skip","Package":"p","Test":"TestB"}`,
				`{"Action":"pass","Package":"p","Elapsed":1}`,
				`{"Action":"pass","Package":"p","Test":"TestA"}`,
				`{"Action":"pass","Package":"p","Elapsed":2}`,
			},
			want:   []string{"skipped (1):", "p TestB: no reason given", "ok    p  0 tests, 1.0 s", "ok    p  1 tests, 2.0 s"},
			absent: []string{"TestA"},
		},
		{
			name: "fail shows the output",
			in: []string{
				`{"Action":"output","Package":"p","Test":"TestA","Output":"got 1, want 2\n"}`,
				`{"Action":"fail","Package":"p","Test":"TestA"}`,
				`{"Action":"fail","Package":"p"}`,
			},
			want:   []string{"FAIL  p TestA\n      got 1, want 2"},
			failed: true,
		},
		{
			name: "panic names the test that did not end",
			in: []string{
				`{"Action":"output","Package":"p","Test":"TestA","Output":"panic: boom\n"}`,
				`{"Action":"fail","Package":"p"}`,
			},
			want:   []string{"FAIL  p TestA (did not end)\n      panic: boom"},
			failed: true,
		},
		{
			name: "failed build",
			in: []string{
				`{"Action":"build-output","ImportPath":"p","Output":"undefined: x\n"}`,
				`{"Action":"build-fail","ImportPath":"p"}`,
			},
			want:   []string{"undefined: x"},
			failed: true,
		},
		{
			name: "other lines are passed on",
			in:   []string{`go: cannot find module`},
			want: []string{"go: cannot find module"},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var out strings.Builder
			failed, err := summarise(strings.NewReader(strings.Join(tt.in, "\n")), &out)
			if err != nil || failed != tt.failed {
				t.Errorf("summarise() = %v, %v, want %v, nil", failed, err, tt.failed)
			}
			for _, want := range tt.want {
				if !strings.Contains(out.String(), want) {
					t.Errorf("output lacks %q:\n%s", want, out.String())
				}
			}
			for _, absent := range tt.absent {
				if strings.Contains(out.String(), absent) {
					t.Errorf("output has %q:\n%s", absent, out.String())
				}
			}
		})
	}
}
