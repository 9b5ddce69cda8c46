// Package relay joins two connections: what comes in on one goes out on the other, until both directions have ended.
//
// It is for the daemon's tunnels to guests' ports and for the command line's end of them, and knows nothing of either.
package relay

import (
	"context"
	"io"
	"net"
	"sync"
)

// Join copies both ways until both have ended, or ctx has, and closes both connections. The end of one way is passed on and leaves the other
// open, as TCP has it; an error ends both.
func Join(ctx context.Context, a, b net.Conn) {
	end := sync.OnceFunc(func() { _ = a.Close(); _ = b.Close() })
	defer end()
	defer context.AfterFunc(ctx, end)()
	var both sync.WaitGroup
	both.Go(func() { pour(a, b, end) })
	both.Go(func() { pour(b, a, end) })
	both.Wait()
}

// pour copies until there is no more, and passes the end on.
func pour(to, from net.Conn, end func()) {
	_, err := io.Copy(to, from)
	half, ok := to.(interface{ CloseWrite() error })
	if err != nil || !ok || half.CloseWrite() != nil {
		end()
	}
}
