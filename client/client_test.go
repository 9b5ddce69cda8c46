package client

import (
	"os"
	"testing"
)

func TestAddress(t *testing.T) {
	t.Parallel()
	tests := []struct{ in, want, base string }{
		{"http://127.0.0.1:8889", "http://127.0.0.1:8889", "http://127.0.0.1:8889"},
		{"https://h/forkd/", "https://h/forkd", "https://h/forkd"},
		{"unix:///run/x.sock", "unix:///run/x.sock", "http://forkd"},
		{"/run/x.sock", "unix:///run/x.sock", "http://forkd"},
		{"localhost:8889", "", ""},
		{"ftp://h", "", ""},
		{"http://", "", ""},
		{"unix://host/path", "", ""},
		{"", "", ""},
	}
	for _, tt := range tests {
		got, err := parseAddress(tt.in)
		if (err != nil) != (tt.want == "") {
			t.Errorf("parseAddress(%q) error = %v", tt.in, err)
			continue
		}
		if err == nil && (got.String() != tt.want || got.base != tt.base) {
			t.Errorf("parseAddress(%q) = %q, %q, want %q, %q", tt.in, got, got.base, tt.want, tt.base)
		}
	}
}

func TestNewReadsEnvironment(t *testing.T) {
	t.Parallel()
	env := map[string]string{"FORKD_URL": "http://h:1", "FORKD_TOKEN": " secret\n"}
	c, err := New(Config{Getenv: func(k string) string { return env[k] }})
	if err != nil {
		t.Fatal(err)
	}
	if c.Address() != "http://h:1" || c.token != "secret" {
		t.Errorf("New() = %q with token %q, want http://h:1 and secret", c.Address(), c.token)
	}
	c, err = New(Config{URL: "http://other:2", Token: "t", Getenv: func(k string) string { return env[k] }})
	if err != nil {
		t.Fatal(err)
	}
	if c.Address() != "http://other:2" || c.token != "t" {
		t.Errorf("New() = %q with token %q, want what was given", c.Address(), c.token)
	}
}

func TestSocketPath(t *testing.T) {
	t.Parallel()
	getenv := func(k string) string { return map[string]string{"XDG_RUNTIME_DIR": "/run/user/7"}[k] }
	want := "/run/user/7/forkd/forkd.sock"
	if os.Geteuid() == 0 {
		want = DefaultSocket
	}
	if got := SocketPath(getenv); got != want {
		t.Errorf("SocketPath() = %q, want %q", got, want)
	}
	if got := SocketPath(func(string) string { return "" }); got != DefaultSocket {
		t.Errorf("SocketPath() without XDG_RUNTIME_DIR = %q, want %q", got, DefaultSocket)
	}
}
