package server

import (
	"encoding/base64"
	"net/http"
	"strings"
	"time"

	"github.com/forkd/forkd/api"
	"github.com/forkd/forkd/internal/sandbox"
)

func (s *Server) ping(w http.ResponseWriter, r *http.Request) error {
	id, err := pathID(r)
	if err != nil {
		return err
	}
	p, err := s.Service.Ping(r.Context(), id)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, api.PingResult{Pong: true, PID: p.PID, AgentVersion: p.Version, Python: p.Python,
		ClockUnixMS: p.GuestTime.UnixMilli(), UptimeMS: p.Uptime.Milliseconds(), LatencyMS: millis(p.RoundTrip)})
	return nil
}

func (s *Server) exec(w http.ResponseWriter, r *http.Request) error {
	id, err := pathID(r)
	if err != nil {
		return err
	}
	var body api.ExecRequest
	if err := decode(w, r, maxCodeBody, &body, "args"); err != nil {
		return err
	}
	req, err := execRequest(body)
	if err != nil {
		return err
	}
	res, err := s.Service.Exec(r.Context(), id, req)
	if err != nil {
		return err
	}
	out := api.ExecResult{ExitCode: res.ExitCode, Signal: res.Signal, TimedOut: res.TimedOut, Truncated: res.Truncated,
		OomKilled: res.OOMKilled, DiskFull: res.DiskFull, DurationMS: millis(res.Duration)}
	if body.Encoding == api.EncodingBase64 {
		out.Encoding = api.EncodingBase64
		out.Stdout = base64.StdEncoding.EncodeToString(res.Stdout)
		out.Stderr = base64.StdEncoding.EncodeToString(res.Stderr)
	} else {
		out.Stdout, out.Stderr = text(res.Stdout), text(res.Stderr)
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}

func execRequest(b api.ExecRequest) (sandbox.ExecRequest, error) {
	var none sandbox.ExecRequest
	if len(b.Args) == 0 || b.Args[0] == "" {
		return none, invalid(`args is the command and its arguments, as in ["ls", "-l"]`, "field %q has no command", "args")
	}
	for i, arg := range b.Args {
		if strings.Contains(arg, "\x00") {
			return none, invalid("", "args[%d] has a NUL byte in it", i)
		}
	}
	if err := checkEnv(b.Env); err != nil {
		return none, err
	}
	timeout, err := execTimeout(b.TimeoutSecs)
	if err != nil {
		return none, err
	}
	if err := between("max_output_bytes", b.MaxOutputBytes, 0, maxOutput); err != nil {
		return none, err
	}
	stdin := []byte(b.Stdin)
	switch b.Encoding {
	case "", api.EncodingText:
	case api.EncodingBase64:
		if stdin, err = base64.StdEncoding.DecodeString(b.Stdin); err != nil {
			return none, invalid("", "field %q is not base64: %v", "stdin", err)
		}
	default:
		return none, invalid("use text or base64", "field %q is %q", "encoding", shorten(string(b.Encoding)))
	}
	return sandbox.ExecRequest{Args: b.Args, Env: b.Env, Cwd: b.Cwd, User: b.User, Timeout: timeout, MaxOutput: b.MaxOutputBytes, Stdin: stdin}, nil
}

func (s *Server) eval(w http.ResponseWriter, r *http.Request) error {
	id, err := pathID(r)
	if err != nil {
		return err
	}
	var body api.EvalRequest
	if err := decode(w, r, maxCodeBody, &body, "code"); err != nil {
		return err
	}
	timeout, err := execTimeout(body.TimeoutSecs)
	if err != nil {
		return err
	}
	if err := between("max_output_bytes", body.MaxOutputBytes, 0, maxOutput); err != nil {
		return err
	}
	res, err := s.Service.Eval(r.Context(), id, sandbox.EvalRequest{Code: body.Code, Timeout: timeout, MaxOutput: body.MaxOutputBytes})
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, evalResult(res, timeout))
	return nil
}

// evalResult gives code that ran out of time the error that it lacks, so that a client that looks no further than error sees it.
func evalResult(res sandbox.EvalResult, timeout time.Duration) api.EvalResult {
	out := api.EvalResult{Result: orNull(res.Result), Error: orNull(res.Error), Stdout: text(res.Stdout), Stderr: text(res.Stderr),
		TimedOut: res.TimedOut, Truncated: res.Truncated, OomKilled: res.OOMKilled, DiskFull: res.DiskFull, DurationMS: millis(res.Duration)}
	if res.TimedOut && res.Error == "" {
		out.Error = orNull("the code was interrupted after " + timeout.String())
	}
	if out.Error != nil {
		out.Result, out.ExitCode = nil, 1
	}
	return out
}

func (s *Server) logs(w http.ResponseWriter, r *http.Request) error {
	id, err := pathID(r)
	if err != nil {
		return err
	}
	console, err := s.Service.Logs(r.Context(), id)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	_, _ = w.Write(console)
	return nil
}

func (s *Server) sandboxStats(w http.ResponseWriter, r *http.Request) error {
	id, err := pathID(r)
	if err != nil {
		return err
	}
	usage, err := s.Service.Usage(r.Context(), id)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, sandboxStats(id, usage))
	return nil
}

// text is output as a JSON string can carry it.
func text(b []byte) string { return strings.ToValidUTF8(string(b), "\uFFFD") }
