package vmmtest

import (
	"bufio"
	"context"
	"encoding/json"
	"os"
	"testing"
	"time"

	"github.com/forkd/forkd/internal/memory"
	"github.com/forkd/forkd/internal/vmm"
)

func ask(t *testing.T, m vmm.Machine, req guestRequest) guestReply {
	t.Helper()
	conn, err := m.Dial(t.Context(), vmm.PortControl)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(5 * time.Second))
	line, _ := json.Marshal(req)
	conn.Write(append(line, '\n'))
	line, err = bufio.NewReader(conn).ReadBytes('\n')
	if err != nil {
		t.Fatal(err)
	}
	var r guestReply
	if err := json.Unmarshal(line, &r); err != nil {
		t.Fatal(err)
	}
	return r
}

func TestSmoke(t *testing.T) {
	e := NewFake(t.TempDir(), FakeOptions{})
	t.Cleanup(func() { e.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	ram, err := memory.New("t", 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	shape := vmm.Shape{MemMiB: 1, VCPUs: 1}
	begin := time.Now()
	m, err := e.Boot(ctx, vmm.BootConfig{Dir: t.TempDir(), Shape: shape, Memory: ram})
	if err != nil {
		t.Fatal(err)
	}
	t.Log("boot", time.Since(begin))
	t.Logf("%+v", ask(t, m, guestRequest{Op: "exec", Args: []string{"sh", "-c", "echo 'a  b' > f; cat f; hostname"}}))
	t.Logf("%+v", ask(t, m, guestRequest{Op: "eval", Code: "x = 3; x+4"}))
	if err := m.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	state, _ := memory.New("s", 4096)
	if err := m.SaveState(ctx, state); err != nil {
		t.Fatal(err)
	}
	if err := m.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := memory.Seal(ram); err != nil {
		t.Fatal(err)
	}
	begin = time.Now()
	p, err := e.Prepare(ctx, vmm.PrepareConfig{Dir: t.TempDir(), Shape: shape, Memory: ram, Layers: []*os.File{ram}})
	if err != nil {
		t.Fatal(err)
	}
	c, err := p.Load(ctx, state)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Resume(ctx); err != nil {
		t.Fatal(err)
	}
	t.Log("child", time.Since(begin))
	t.Logf("%+v", ask(t, c, guestRequest{Op: "eval", Code: "x"}))
	t.Logf("%+v", ask(t, c, guestRequest{Op: "exec", Args: []string{"poweroff"}}))
	<-c.Done()
	t.Log(c.Exit(), c.Process())
	con, _ := c.(vmm.Console).Console(ctx)
	t.Log(string(con))
	t.Log(c.Kill())
}
