package agent_test

import (
	"context"
	"github.com/forkd/forkd/internal/guest/agentclient"
	"github.com/forkd/forkd/internal/guest/agentproto"
	"net"
	"os"
	"testing"
)

func BenchmarkLat(b *testing.B) {
	sock := os.Getenv("LATSOCK")
	if sock == "" {
		b.Skip()
	}
	c := agentclient.New(func(ctx context.Context) (net.Conn, error) { return net.Dial("unix", sock) }, agentclient.Options{Resync: true})
	defer c.Close()
	ctx := context.Background()
	b.Run("ping", func(b *testing.B) {
		for b.Loop() {
			c.Ping(ctx)
		}
	})
	b.Run("exec", func(b *testing.B) {
		for b.Loop() {
			c.Exec(ctx, agentproto.ExecRequest{Args: []string{"/bin/true"}})
		}
	})
	b.Run("eval", func(b *testing.B) {
		for b.Loop() {
			c.Eval(ctx, agentproto.EvalRequest{Code: "1+1"})
		}
	})
}
