package vmmtest

import (
	"bytes"
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/forkd/forkd/internal/guest/agentproto"
)

// The commands of a fake guest, enough for tests of what is above an engine. `sh -c` knows words in quotes, `;`, `&&`, newlines,
// and `> FILE` at the end of a command.
//
//	echo WORDS… | cat [FILE] | rm FILE | true | false | umask | mkdir | chmod (nothing) | exit N | env | hostname | instance | uptime
//	sleep SECONDS | hang            (until its timeout)
//	urandom                         (32 random hex digits)
//	peek OFFSET N | poke OFFSET TEXT | dirty PAGES      (guest memory)
//	console WORDS…                  (print to the console)
//	stderr WORDS…                   (print to standard error)
//	spew N                          (N bytes of output)
//	oom NAME                        (ends as if the kernel had killed it for want of memory)
//	filldisk | cleardisk            (fails, with the disk full from now on; makes room)
//	poweroff | crash | panic WORDS…

// shell runs one command of a guest.
type shell struct {
	guest          *guest
	env            []string
	stdin          []byte
	stdout, stderr bytes.Buffer
	oom            bool // it was killed for want of memory
}

// Exit codes, as shells use them.
const (
	exitUsage    = 2
	exitNotFound = 127
	exitTimeout  = -1 // the context ended
)

// command is one of the guest's programs.
type command func(ctx context.Context, sh *shell, args []string) int

// commands returns the guest's programs by name.
func commands() map[string]command {
	return map[string]command{
		"true":     func(context.Context, *shell, []string) int { return 0 },
		"umask":    func(context.Context, *shell, []string) int { return 0 },
		"mkdir":    func(context.Context, *shell, []string) int { return 0 },
		"chmod":    func(context.Context, *shell, []string) int { return 0 },
		"false":    func(context.Context, *shell, []string) int { return 1 },
		"echo":     func(_ context.Context, sh *shell, args []string) int { return sh.say(strings.Join(args, " ")) },
		"hostname": func(_ context.Context, sh *shell, _ []string) int { return sh.say(sh.guest.view().Hostname) },
		"instance": func(_ context.Context, sh *shell, _ []string) int { return sh.say(sh.guest.view().InstanceID) },
		"uptime":   func(_ context.Context, sh *shell, _ []string) int { return sh.say(sh.guest.uptime().String()) },
		"env":      func(_ context.Context, sh *shell, _ []string) int { return sh.say(strings.Join(sh.env, "\n")) },
		"exit":     exit,
		"cat":      cat,
		"rm":       remove,
		"sleep":    sleep,
		"hang":     hang,
		"urandom":  urandom,
		"peek":     peek,
		"poke":     poke,
		"dirty":    dirty,
		"console":  console,
		"stderr":   complain,
		"spew":     spew,
		"poweroff": poweroff,
		"crash":    crash,
		"panic":    panicked,
		"oom":      oom,
		"filldisk": func(_ context.Context, sh *shell, _ []string) int {
			sh.guest.shortage(func(n *agentproto.Notice) { n.DiskFull = true })
			return sh.fail(1, "no space left on device")
		},
		"cleardisk": func(_ context.Context, sh *shell, _ []string) int {
			sh.guest.shortage(func(n *agentproto.Notice) { n.DiskFull = false })
			return 0
		},
		"sh":      script,
		"/bin/sh": script,
		"bash":    script,
	}
}

func (sh *shell) run(ctx context.Context, args []string) int {
	do, ok := commands()[args[0]]
	if !ok {
		return sh.fail(exitNotFound, "%s: not found", args[0])
	}
	return do(ctx, sh, args[1:])
}

func (sh *shell) say(line string) int {
	sh.stdout.WriteString(line + "\n")
	return 0
}

func (sh *shell) fail(code int, format string, args ...any) int {
	fmt.Fprintf(&sh.stderr, format+"\n", args...)
	return code
}

// script runs `sh -c TEXT`.
func script(ctx context.Context, sh *shell, args []string) int {
	if len(args) > 0 && strings.HasPrefix(args[0], "-") && strings.HasSuffix(args[0], "c") {
		args = args[1:]
	}
	if len(args) == 0 {
		return sh.fail(exitUsage, "sh: only sh -c TEXT is known here")
	}
	code := 0
	for _, line := range strings.FieldsFunc(args[0], func(r rune) bool { return r == ';' || r == '\n' }) {
		for _, part := range strings.Split(line, "&&") {
			if words := split(part); len(words) > 0 {
				code = sh.redirected(ctx, words)
			}
			if code != 0 {
				break
			}
		}
		if code == exitTimeout {
			break
		}
	}
	return code
}

// redirected runs a command whose last words may be "> FILE".
func (sh *shell) redirected(ctx context.Context, words []string) int {
	n := len(words)
	if n < 3 || words[n-2] != ">" {
		return sh.run(ctx, words)
	}
	inner := &shell{guest: sh.guest, env: sh.env, stdin: sh.stdin}
	code := inner.run(ctx, words[:n-2])
	sh.stderr.Write(inner.stderr.Bytes())
	ok := sh.guest.change(func(s *store) {
		if s.Files == nil {
			s.Files = map[string]string{}
		}
		s.Files[words[n-1]] = inner.stdout.String()
	})
	if !ok {
		return sh.fail(1, "sh: %s: no space left", words[n-1])
	}
	return code
}

// split splits a command into words; quotes of both kinds keep what is between them together.
func split(s string) []string {
	var words []string
	var word strings.Builder
	var quote rune
	begun := false
	end := func() {
		if begun {
			words = append(words, word.String())
		}
		word.Reset()
		begun = false
	}
	for _, r := range s {
		switch {
		case quote != 0 && r == quote:
			quote = 0
		case quote != 0:
			word.WriteRune(r)
		case r == '"' || r == '\'':
			quote, begun = r, true
		case r == ' ' || r == '\t':
			end()
		case r == '>':
			end()
			words = append(words, ">")
		default:
			word.WriteRune(r)
			begun = true
		}
	}
	end()
	return words
}

func exit(_ context.Context, sh *shell, args []string) int {
	code, err := strconv.Atoi(strings.Join(args, ""))
	if err != nil {
		return sh.fail(exitUsage, "exit: %v", err)
	}
	return code
}

func cat(_ context.Context, sh *shell, args []string) int {
	if len(args) == 0 {
		sh.stdout.Write(sh.stdin)
		return 0
	}
	memory := sh.guest.view()
	identity := map[string]string{
		"/proc/sys/kernel/hostname": memory.Hostname + "\n",
		"/etc/hostname":             memory.Hostname + "\n",
		"/etc/machine-id":           memory.MachineID + "\n",
	}
	for _, name := range args {
		text, ok := memory.Files[name]
		if !ok {
			text, ok = identity[name]
		}
		if !ok {
			return sh.fail(1, "cat: %s: No such file or directory", name)
		}
		sh.stdout.WriteString(text)
	}
	return 0
}

func remove(_ context.Context, sh *shell, args []string) int {
	sh.guest.change(func(s *store) {
		for _, name := range args {
			delete(s.Files, name)
		}
	})
	return 0
}

func sleep(ctx context.Context, sh *shell, args []string) int {
	seconds, err := strconv.ParseFloat(strings.Join(args, ""), 64)
	if err != nil {
		return sh.fail(exitUsage, "sleep: %v", err)
	}
	if stall(ctx, max(1, time.Duration(seconds*float64(time.Second)))) != nil {
		return exitTimeout
	}
	return 0
}

func hang(ctx context.Context, _ *shell, _ []string) int {
	<-ctx.Done()
	return exitTimeout
}

func urandom(_ context.Context, sh *shell, _ []string) int {
	b := sh.guest.draw(func(s *store) *generator { return &s.Random })
	return sh.say(fmt.Sprintf("%x", b[:16]))
}

// span checks a piece of the guest's memory that a command may touch.
func (sh *shell) span(offset string, n int) ([]byte, bool) {
	at, err := strconv.Atoi(offset)
	if err != nil || at < dataOffset || n < 0 || at > len(sh.guest.memory)-n {
		sh.fail(exitUsage, "memory can be reached from %d to %d, not at %q for %d bytes", dataOffset, len(sh.guest.memory), offset, n)
		return nil, false
	}
	return sh.guest.memory[at : at+n], true
}

func peek(_ context.Context, sh *shell, args []string) int {
	if len(args) != 2 {
		return sh.fail(exitUsage, "usage: peek OFFSET N")
	}
	n, err := strconv.Atoi(args[1])
	if err != nil {
		return sh.fail(exitUsage, "peek: %v", err)
	}
	memory, ok := sh.span(args[0], n)
	if !ok {
		return exitUsage
	}
	sh.guest.gate.through(func() { sh.stdout.Write(memory) })
	return 0
}

func poke(_ context.Context, sh *shell, args []string) int {
	if len(args) != 2 {
		return sh.fail(exitUsage, "usage: poke OFFSET TEXT")
	}
	memory, ok := sh.span(args[0], len(args[1]))
	if !ok {
		return exitUsage
	}
	sh.guest.gate.through(func() { copy(memory, args[1]) })
	return 0
}

// dirty writes to that many pages, with what differs from time to time.
func dirty(_ context.Context, sh *shell, args []string) int {
	pages, err := strconv.Atoi(strings.Join(args, ""))
	if err != nil {
		return sh.fail(exitUsage, "dirty: %v", err)
	}
	memory, ok := sh.span(strconv.Itoa(dataOffset), pages*pageBytes)
	if !ok {
		return exitUsage
	}
	for at := 0; at < len(memory); at += pageBytes {
		sh.guest.gate.through(func() { memory[at]++ })
	}
	return 0
}

func console(_ context.Context, sh *shell, args []string) int {
	sh.guest.print(strings.Join(args, " ") + "\n")
	return 0
}

func complain(_ context.Context, sh *shell, args []string) int {
	return sh.fail(0, "%s", strings.Join(args, " "))
}

func spew(_ context.Context, sh *shell, args []string) int {
	n, err := strconv.Atoi(strings.Join(args, ""))
	if err != nil || n < 0 || n > 64<<20 {
		return sh.fail(exitUsage, "spew: want a number of bytes, at most 64 MiB")
	}
	sh.stdout.Write(bytes.Repeat([]byte{'x'}, n))
	return 0
}

func poweroff(_ context.Context, sh *shell, _ []string) int {
	sh.guest.shutdown("poweroff")
	return 0
}

func crash(context.Context, *shell, []string) int {
	die()
	return 0
}

// panicked ends the guest as a kernel does that panics: to its monitor it is a reboot.
func panicked(_ context.Context, sh *shell, args []string) int {
	sh.guest.print("Kernel panic - not syncing: " + strings.Join(args, " ") + "\n")
	sh.guest.end(panicPrefix + strings.Join(args, " "))
	return 0
}

func oom(_ context.Context, sh *shell, args []string) int {
	sh.oom = true
	sh.guest.shortage(func(n *agentproto.Notice) {
		n.OOMKills++
		n.Victim = strings.Join(args, " ")
	})
	return 128 + 9
}
