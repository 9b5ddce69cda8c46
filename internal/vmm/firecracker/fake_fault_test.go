package firecracker

import (
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// fault does what was ordered for a call. It returns true when the connection is of no use any more.
func (f *fake) fault(call string, conn net.Conn) bool {
	if call != f.orders.Fault {
		return false
	}
	if f.orders.Once {
		f.orders.Fault = ""
	}
	switch f.orders.Kind {
	case "kill":
		fmt.Fprintln(os.Stderr, "fake: killed at", call)
		unix.Kill(os.Getpid(), unix.SIGKILL)
	case "stall":
		time.Sleep(time.Minute)
	case "garbage":
		conn.Write([]byte("\x00\x01 this is no HTTP \xff\r\n\r\n"))
	case "half":
		conn.Write([]byte("HTTP/1.1 200 \r\nContent-Length: 400\r\n\r\n{\"half"))
		time.Sleep(20 * time.Millisecond)
		conn.Close()
	case "close":
		conn.Close()
	case "refuse":
		const why = `{"fault_message":"ordered to refuse"}`
		fmt.Fprintf(conn, "HTTP/1.1 400 \r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(why), why)
		return false || f.drop(conn)
	}
	return true
}

// drop goes on reading requests elsewhere: a refused call changed nothing.
func (f *fake) drop(conn net.Conn) bool {
	f.orders.Fault = ""
	go f.connection(conn)
	return true
}
