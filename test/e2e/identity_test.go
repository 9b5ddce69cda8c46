package e2e

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/forkd/forkd/client"
)

// self is what must be a child's own.
type self struct {
	URandom     string `json:"urandom"`
	UUID4       string `json:"uuid4"`
	OpenSSL     string `json:"openssl"`
	Random      string `json:"random"`
	Numpy       string `json:"numpy"`
	Generator   string `json:"generator"` // a numpy generator that was made in the parent
	Hostname    string `json:"hostname"`
	MachineID   string `json:"machine_id"`
	InstanceID  string `json:"instance_id"`
	Environment string `json:"environment"`
	ExecOpenSSL string `json:"-"` // of commands started in the child
	ExecUUID    string `json:"-"`
}

const askSelf = `{"urandom": os.urandom(16).hex(), "uuid4": str(uuid.uuid4()), "openssl": ssl.RAND_bytes(16).hex(),
 "random": random.random().hex(), "numpy": float(numpy.random.rand()).hex(), "generator": float(generator.random()).hex(),
 "hostname": socket.gethostname(), "machine_id": open("/etc/machine-id").read().strip(),
 "instance_id": open("/run/forkd/instance-id").read().strip(), "environment": os.environ["FORKD_INSTANCE_ID"]}`

const execSelf = `openssl rand -hex 16; cat /proc/sys/kernel/random/uuid /proc/sys/kernel/hostname /etc/hostname`

// TestSiblingsAreIndividuals asks children of one snapshot, made in both ways, for everything that two of them must not share.
func TestSiblingsAreIndividuals(t *testing.T) {
	d := sharedDaemon(t)
	const n = 20
	children := d.fork(n)
	d.fillPool(pyTag, n)
	claimed := d.fork(n, fromPool)
	d.fillPool(pyTag, 0)
	for _, g := range claimed {
		if g.Path != "claim" {
			t.Fatalf("%v was made in the way %q, want a claim", g, g.Path)
		}
	}
	children = append(children, claimed...)
	selves := make([]self, len(children))
	d.each(children, func(i int, g *guest) error {
		return errors.Join(ask(g, &selves[i]), checkClock(g))
	})
	value := reflect.ValueOf(selves)
	for f := range value.Type().Elem().NumField() {
		seen := map[string]int{}
		for i := range selves {
			v := value.Index(i).Field(f).String()
			if v == "" {
				t.Errorf("%v has no %s", children[i], value.Type().Elem().Field(f).Name)
			}
			if before, twice := seen[v]; twice {
				t.Errorf("%v (%s) and %v (%s) have the same %s: %s", children[before], children[before].Path, children[i], children[i].Path,
					value.Type().Elem().Field(f).Name, v)
			}
			seen[v] = i
		}
	}
}

var machineID = regexp.MustCompile(`^[0-9a-f]{32}$`)

// ask finds out what a child is, and checks what is known beforehand.
func ask(g *guest, s *self) error {
	if err := g.tryPyJSON(askSelf, s); err != nil {
		return err
	}
	out, err := g.trySh(execSelf)
	if err != nil {
		return err
	}
	lines := strings.Split(out, "\n")
	if len(lines) != 4 {
		return fmt.Errorf("%q", out)
	}
	s.ExecOpenSSL, s.ExecUUID = lines[0], lines[1]
	for what, got := range map[string]string{"hostname": s.Hostname, "hostname of a command": lines[2], "/etc/hostname": lines[3],
		"instance id": s.InstanceID, "instance id in the environment": s.Environment} {
		if got != g.ID {
			return fmt.Errorf("its %s is %q, want its id", what, got)
		}
	}
	if !machineID.MatchString(s.MachineID) {
		return fmt.Errorf("its machine id is %q", s.MachineID)
	}
	return nil
}

// checkClock compares a guest's clock with the host's. The guest looks at it somewhere between the two looks at ours.
func checkClock(g *guest) error {
	for what, read := range map[string]func() (float64, error){
		"the interpreter": func() (now float64, err error) { return now, g.tryPyJSON("time.time()", &now) },
		"ping": func() (float64, error) {
			ctx, cancel := g.d.limited()
			defer cancel()
			p, err := g.d.client.Ping(ctx, g.ID)
			return float64(p.ClockUnixMS) / 1000, err
		},
	} {
		before := time.Now()
		secs, err := read()
		after := time.Now()
		if err != nil {
			return err
		}
		now := time.Unix(0, int64(secs*1e9))
		if now.Before(before.Add(-time.Second)) || now.After(after.Add(time.Second)) {
			return fmt.Errorf("its clock, by %s, is at %v when ours goes from %v to %v", what, now, before, after)
		}
	}
	return nil
}

// Hooks that every child of the snapshot runs.
const hooks = `mkdir -p /etc/forkd/on-fork.d && cd /etc/forkd/on-fork.d
cat >20-note <<'EOF'
#!/bin/sh
echo "$FORKD_INSTANCE_ID $FORKD_HOSTNAME $WHO" >>/root/hook.log
EOF
cat >10-first <<'EOF'
#!/bin/sh
echo first >>/root/hook.log
EOF
cat >30-fail <<'EOF'
#!/bin/sh
[ "$FAIL" != yes ] || { echo "this hook says no" >&2; exit 7; }
EOF
echo 'echo never >>/root/hook.log' >40-not-executable
chmod 755 ??-note ??-first ??-fail`

// TestHooks: the user's hooks are a part of the identity. They run once, in order, at the fork or at the claim; and when one fails there
// is no child.
func TestHooks(t *testing.T) {
	t.Parallel()
	d := ownDaemon(t, setup{})
	d.snapshot(client.SnapshotRequest{Tag: "hooks", WarmUp: []client.WarmUp{{Kind: "exec", Code: hooks}}})
	who := func(name string) func(*client.ForkRequest) { return withEnv(map[string]string{"WHO": name}) }
	check := func(g *guest, name string) {
		t.Helper()
		want := fmt.Sprintf("first\n%s %s %s", g.ID, g.ID, name)
		if got := g.sh("cat /root/hook.log"); got != want {
			t.Errorf("log of the hooks of %v (%s): got %q, want %q", g, g.Path, got, want)
		}
	}
	for _, g := range d.fork(2, of("hooks"), who("cold")) {
		check(g, "cold")
	}
	d.fillPool("hooks", 2)
	for _, g := range d.fork(2, of("hooks"), who("claimed"), fromPool) {
		check(g, "claimed")
	}
	d.killGuests()

	fail := withEnv(map[string]string{"FAIL": "yes"})
	for name, path := range map[string]func(*client.ForkRequest){"cold": func(*client.ForkRequest) {}, "claimed": fromPool} {
		d.awaitPool("hooks", 2)
		guests, err := d.tryFork(2, of("hooks"), fail, path)
		wantError(t, name+" child whose hook fails", err, 500, "identity_failed", "30-fail", "this hook says no", "status 7")
		if len(guests) > 0 {
			t.Errorf("children whose hook fails were handed out: %v", guests)
		}
	}
	d.awaitPool("hooks", 2)
	d.checkTidy()
	d.checkSandboxes()
	// The snapshot is as good as before.
	for _, g := range d.fork(1, of("hooks"), who("later")) {
		check(g, "later")
	}
}

// TestEnvAndMetadata: they are the child's that they were given to, by whatever way it came to be, and no other's.
func TestEnvAndMetadata(t *testing.T) {
	d := sharedDaemon(t)
	d.fillPool(pyTag, 1)
	env := map[string]string{"PLAIN": "value", "ODD": "a b\"c'd$e\\f\nüñ=x", "EMPTY": ""}
	metadata := map[string]string{"owner": "test", "a key": "ü\n"}
	dress := func(r *client.ForkRequest) { r.Env, r.Metadata, r.TimeoutSecs = env, metadata, 3600 }
	guests := append(d.fork(1, dress), d.fork(1, dress, fromPool)...)
	bare := d.fork1()
	d.fillPool(pyTag, 0)
	for _, g := range guests {
		info, err := g.now()
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(info.Env, env); diff != "" {
			t.Errorf("env of %v (-got +want):\n%s", g, diff)
		}
		if diff := cmp.Diff(info.Metadata, metadata); diff != "" {
			t.Errorf("metadata of %v (-got +want):\n%s", g, diff)
		}
		if info.DeadlineUnix == nil || time.Until(time.Unix(*info.DeadlineUnix, 0)) < 50*time.Minute {
			t.Errorf("deadline of %v: got %v, want about an hour from now", g, info.DeadlineUnix)
		}
		for _, name := range slices.Sorted(maps.Keys(env)) {
			if got := g.sh("printenv " + name); got != env[name] {
				t.Errorf("%s in a command of %v (%s): got %q, want %q", name, g, g.Path, got, env[name])
			}
			var got string
			if err := g.tryPyJSON(fmt.Sprintf("os.environ[%q]", name), &got); err != nil || got != env[name] {
				t.Errorf("%s in the interpreter of %v (%s): got %q, %v, want %q", name, g, g.Path, got, err, env[name])
			}
		}
		if got := g.sh("echo $PLAIN"); got != "value" {
			t.Errorf("the environment of %v has %q", g, got)
		}
	}
	if got := bare.py(`"PLAIN" in os.environ`) + bare.sh("printenv PLAIN || true"); got != "False" {
		t.Errorf("a sibling has the environment of another: %q", got)
	}
}
