package client

import (
	"context"
	"encoding/base64"
	"fmt"
	"net/http"
	"time"

	"github.com/forkd/forkd/api"
)

// Ping is an answer of a guest's agent.
type Ping = api.PingResult

// EvalResult is the end of an evaluation: its Result, or its Error with the traceback.
type EvalResult = api.EvalResult

// ExecRequest is a command. There is no shell in between: for one use []string{"sh", "-c", "…"}.
type ExecRequest struct {
	Args           []string
	Env            map[string]string
	Cwd            string // "": the agent's default
	User           string // "": the agent's default
	Stdin          []byte
	Timeout        time.Duration // 0: 30 seconds
	MaxOutputBytes int           // of each of stdout and stderr; 0: 1 MiB
}

// ExecResult is the end of a command, also of one that failed.
type ExecResult struct {
	Stdout, Stderr []byte
	ExitCode       int
	Signal         string // that ended it, or ""
	TimedOut       bool
	Truncated      bool // output was cut at MaxOutputBytes
	OOMKilled      bool // the guest's kernel killed it, or a process that it had started, for want of memory
	DiskFull       bool // it failed, and the guest's disk was full
	Duration       time.Duration
}

// EvalRequest is code for the guest's resident Python interpreter.
type EvalRequest struct {
	Code           string
	Timeout        time.Duration // 0: 30 seconds
	MaxOutputBytes int           // of each of stdout and stderr; 0: 1 MiB
}

// Ping makes a round trip to a sandbox's agent.
func (c *Client) Ping(ctx context.Context, id string) (Ping, error) {
	var p Ping
	err := c.call(ctx, http.MethodPost, sandboxPath(id)+"/ping", nil, &p)
	return p, err
}

// Exec runs a command in a sandbox and waits for it. When ctx ends, the command is killed. A command that fails is a result, not
// an error.
//
//	res, err := c.Exec(ctx, id, client.ExecRequest{Args: []string{"ls", "/"}})
//	if err == nil && res.ExitCode != 0 { … }
func (c *Client) Exec(ctx context.Context, id string, req ExecRequest) (ExecResult, error) {
	body := api.ExecRequest{Args: req.Args, Env: req.Env, Cwd: req.Cwd, User: req.User, Encoding: api.EncodingBase64,
		Stdin: base64.StdEncoding.EncodeToString(req.Stdin), MaxOutputBytes: req.MaxOutputBytes}
	if req.Timeout > 0 {
		body.TimeoutSecs = Seconds(req.Timeout)
	}
	var answer api.ExecResult
	if err := c.call(ctx, http.MethodPost, sandboxPath(id)+"/exec", body, &answer); err != nil {
		return ExecResult{}, err
	}
	res := ExecResult{ExitCode: answer.ExitCode, Signal: answer.Signal, TimedOut: answer.TimedOut, Truncated: answer.Truncated, OOMKilled: answer.OomKilled, DiskFull: answer.DiskFull,
		Duration: time.Duration(answer.DurationMS * float64(time.Millisecond))}
	var err error
	if res.Stdout, err = base64.StdEncoding.DecodeString(answer.Stdout); err != nil {
		return ExecResult{}, fmt.Errorf("stdout of the command: %w", err)
	}
	if res.Stderr, err = base64.StdEncoding.DecodeString(answer.Stderr); err != nil {
		return ExecResult{}, fmt.Errorf("stderr of the command: %w", err)
	}
	return res, nil
}

// Eval runs code in a sandbox's resident Python interpreter. Code that raises is a result with Error set, not an error.
//
//	res, err := c.Eval(ctx, id, client.EvalRequest{Code: "1 + 1"}) // *res.Result == "2"
func (c *Client) Eval(ctx context.Context, id string, req EvalRequest) (EvalResult, error) {
	body := api.EvalRequest{Code: req.Code, MaxOutputBytes: req.MaxOutputBytes}
	if req.Timeout > 0 {
		body.TimeoutSecs = Seconds(req.Timeout)
	}
	var res EvalResult
	err := c.call(ctx, http.MethodPost, sandboxPath(id)+"/eval", body, &res)
	return res, err
}

// Logs returns the newest 64 KiB of a sandbox's console.
func (c *Client) Logs(ctx context.Context, id string) ([]byte, error) {
	return c.raw(ctx, sandboxPath(id)+"/logs")
}
