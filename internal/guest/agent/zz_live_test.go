package agent_test

import (
	"bufio"
	"context"
	"crypto/rand"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/forkd/forkd/internal/guest/agentclient"
	"github.com/forkd/forkd/internal/guest/agentproto"
)

func TestLive(t *testing.T) {
	sock := os.Getenv("AGSOCK")
	if sock == "" {
		t.Skip()
	}
	ctx, cancel := context.WithTimeout(t.Context(), 120*time.Second)
	defer cancel()
	c := agentclient.New(func(ctx context.Context) (net.Conn, error) {
		if fd := os.Getenv("AGFD"); fd != "" {
			n, _ := strconv.Atoi(fd)
			return net.FileConn(os.NewFile(uintptr(n), "ag"))
		}
		return net.Dial("unix", sock)
	}, agentclient.Options{Resync: os.Getenv("RESYNC") != ""})
	defer c.Close()
	step := func(name string, f func()) { s := time.Now(); f(); t.Logf("%s took %v", name, time.Since(s)) }
	ping := func() {
		step("ping", func() {
			_, err := c.Ping(ctx)
			if err != nil {
				t.Error(err)
			}
		})
	}
	run := func(sh string, user string) {
		step("exec", func() {
			r, err := c.Exec(ctx, agentproto.ExecRequest{Args: []string{"sh", "-c", sh}, User: user, TimeoutMS: 20000})
			t.Logf("%s\n%s%s exit %d %v timeout=%v %v", sh, r.Stdout, r.Stderr, r.ExitCode, r.Signal, r.TimedOut, err)
		})
	}
	ev := func(code string) {
		step("eval", func() {
			r, err := c.Eval(ctx, agentproto.EvalRequest{Code: code, TimeoutMS: 60000})
			t.Logf("%s => %s %s %s %s %v", code, r.Result, r.Stdout, r.Stderr, r.Error, err)
		})
	}
	ident := func() {
		e := make([]byte, 64)
		rand.Read(e)
		step("identity", func() {
			ack, err := c.Identify(ctx, agentproto.Identity{InstanceID: "sb1", Hostname: "sb1", MachineID: "0123456789abcdef0123456789abcdef", UnixNano: time.Now().UnixNano(), Entropy: e, Env: []string{"FOO=bar"}, RunHooks: true})
			t.Logf("%+v %v skew %v", ack, err, time.Until(time.Unix(0, ack.UnixNano)))
		})
	}
	const vals = "numpy.random.rand(), random.random(), ssl.RAND_bytes(4).hex(), uuid.uuid4(), g.random(), os.urandom(4).hex()"
	if os.Getenv("PARENT") != "" {
		ping()
		run("echo hi", "")
		ev("1+1")
		ev("import numpy, ssl, uuid, os, random\ng=numpy.random.default_rng()\nnumpy.random.rand(); ssl.RAND_bytes(4)")
		ident()
		ev(vals)
		step("quiesce", func() { t.Log(c.Quiesce(ctx)) })
		return
	}
	if steps := os.Getenv("STEPS"); steps != "" {
		in := bufio.NewReader(os.Stdin)
		for _, st := range strings.Split(steps, "|") {
			s := time.Now()
			switch st {
			case "ping":
				c.Ping(ctx)
			case "ident":
				e := make([]byte, 64)
				rand.Read(e)
				_, err := c.Identify(ctx, agentproto.Identity{InstanceID: "sb1", Hostname: "sb1", MachineID: "0123456789abcdef0123456789abcdef", UnixNano: time.Now().UnixNano(), Entropy: e, Env: []string{"FOO=bar"}, RunHooks: true})
				if err != nil {
					t.Error(err)
				}
			case "ident0":
				e := make([]byte, 64)
				rand.Read(e)
				_, err := c.Identify(ctx, agentproto.Identity{InstanceID: "sb1", Entropy: e})
				if err != nil {
					t.Error(err)
				}
			case "exec":
				c.Exec(ctx, agentproto.ExecRequest{Args: []string{"true"}})
			case "kaslr":
				r, _ := c.Exec(ctx, agentproto.ExecRequest{MaxOutput: 8 << 20, Args: []string{"grep", " [tTwW] ", "/proc/kallsyms"}})
				os.WriteFile("/tmp/agt/kaslr", r.Stdout, 0o644)
			case "maps":
				r, _ := c.Exec(ctx, agentproto.ExecRequest{Args: []string{"cat", "/dev/shm/maps"}})
				os.WriteFile("/tmp/agt/maps", r.Stdout, 0o644)
			case "quiesce":
				c.Quiesce(ctx)
			default:
				r, err := c.Eval(ctx, agentproto.EvalRequest{Code: strings.TrimPrefix(st, "PR ")})
				if strings.HasPrefix(st, "PR ") {
					fmt.Println("  =>", r.Result)
				}
				if err != nil || r.Error != "" {
					t.Error(r, err)
				}
			}
			fmt.Printf("STEP %s %.1fms\n", st, float64(time.Since(s).Microseconds())/1000)
			in.ReadString('\n')
		}
		return
	}
	switch os.Getenv("MID") {
	case "parent":
		ev("import numpy, ssl, uuid, os, random, time\ng=numpy.random.default_rng()\nnumpy.random.rand(); ssl.RAND_bytes(4)")
		run("ulimit -n; ulimit -Hn; cat /etc/hosts; ls -la /etc/machine-id; mkdir -p /etc/forkd/on-fork.d; printf '#!/bin/sh\\nhead -c 8 /dev/urandom | od -An -tx1 > /tmp/hook\\n' > /etc/forkd/on-fork.d/x; chmod +x /etc/forkd/on-fork.d/x", "")
		ev("r=random.Random(); 1")
		t.Log(c.Quiesce(ctx))
		go c.Eval(ctx, agentproto.EvalRequest{Code: "vals=[]\nwhile 'FOO' not in os.environ: time.sleep(0.01)\nvals=[numpy.random.rand(), random.random(), ssl.RAND_bytes(4).hex(), g.random()]"})
		go c.Exec(ctx, agentproto.ExecRequest{Args: []string{"sh", "-c", "sleep 4; date > /tmp/later"}})
		time.Sleep(time.Second)
		return
	case "child":
		ident()
		ev("vals")
		run("cat /tmp/hook; hostname; sleep 5; cat /tmp/later", "")
		return
	}
	if os.Getenv("NOID") != "" {
		ev(vals)
		return
	}
	ping()
	ping()
	ping()
	ident()
	ev("1+1")
	ev(vals)
	ident()
	ev(vals)
	run("echo hi", "")
	run("echo hi", "")
	ping()
}
