package agent_test

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/forkd/forkd/internal/guest/agent"
	"github.com/forkd/forkd/internal/guest/agentclient"
	"github.com/forkd/forkd/internal/guest/agentproto"
)

func TestSmoke(t *testing.T) {
	a, err := agent.New(agent.Options{Sandboxed: true, Root: t.TempDir(), Log: func(m string) { t.Log(m) }})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	l, err := net.Listen("unix", t.TempDir()+"/s")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- a.Serve(ctx, l) }()
	c := agentclient.New(func(ctx context.Context) (net.Conn, error) { return net.Dial("unix", l.Addr().String()) }, agentclient.Options{Resync: true})
	p, err := c.Ping(ctx)
	t.Logf("%+v %v", p, err)
	r, err := c.Exec(ctx, agentproto.ExecRequest{Args: []string{"sh", "-c", "echo hi; echo err >&2; id; exit 3"}})
	t.Logf("%+v %s %v", r, r.Stdout, err)
	for _, code := range []string{"1+1", "x=5\nx*2", "print('a')\n1/0", "import os; os.system('echo sub')", "while True: pass", "x", "import os; os._exit(3)", "x", "exit(4)"} {
		s := time.Now()
		r, err := c.Eval(ctx, agentproto.EvalRequest{Code: code, TimeoutMS: 1000})
		t.Logf("%q: %+v out=%s err=%v %v", code, r, r.Stdout, err, time.Since(s))
	}
	ack, err := c.Identify(ctx, agentproto.Identity{InstanceID: "i1", Hostname: "h1", MachineID: "0123456789abcdef0123456789abcdef", UnixNano: 1, Entropy: make([]byte, 64), Env: []string{"A=b"}, RunHooks: true})
	t.Logf("%+v %v", ack, err)
	t.Log(c.Eval(ctx, agentproto.EvalRequest{Code: "import os,random; (os.environ['A'], random.random())"}))
	t.Log(c.Quiesce(ctx))
	c.Close()
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	a.Close()
}
