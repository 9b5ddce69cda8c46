package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/alecthomas/kong"
)

type completionCmd struct {
	Shell string `arg:"" enum:"bash,zsh,fish" help:"bash, zsh or fish."`
}

// Help says how a script is installed.
func (c *completionCmd) Help() string {
	return "bash: source <(forkd completion bash); zsh: source <(forkd completion zsh); " +
		"fish: forkd completion fish > ~/.config/fish/completions/forkd.fish"
}

// Run prints a script that completes commands, flags, and the names of what the daemon has.
func (c *completionCmd) Run(p *program) error {
	leaves := leavesOf(p.model.Node, "")
	var script string
	switch c.Shell {
	case "bash":
		script = bashScript(leaves)
	case "zsh":
		script = "autoload -U +X bashcompinit && bashcompinit\n" + bashScript(leaves)
	case "fish":
		script = fishScript(leaves)
	}
	_, err := fmt.Fprint(p.stdout, script)
	return err
}

// leaf is a command, or a group of commands, as completion sees it.
type leaf struct {
	path  string   // "image build"; "" is the program itself
	words []string // commands below it, and flags
	help  string
	names string // the command line that lists what its arguments may be, or ""
}

func leavesOf(node *kong.Node, path string) []leaf {
	l := leaf{path: path, help: node.Help}
	for _, child := range node.Children {
		if !child.Hidden {
			l.words = append(l.words, child.Name)
		}
	}
	for _, flags := range node.AllFlags(true) {
		for _, f := range flags {
			l.words = append(l.words, "--"+f.Name)
		}
	}
	for _, arg := range node.Positional {
		if l.names == "" {
			l.names = listing(path, arg.Name)
		}
	}
	all := []leaf{l}
	for _, child := range node.Children {
		if !child.Hidden {
			all = append(all, leavesOf(child, strings.TrimSpace(path+" "+child.Name))...)
		}
	}
	return all
}

// listing is the command that lists what an argument or a flag may be.
func listing(path, name string) string {
	switch {
	case strings.HasPrefix(name, "name") && strings.HasPrefix(path, "workspace ") && path != "workspace create":
		return "forkd workspace ls -q"
	case strings.HasPrefix(name, "id"):
		return "forkd ls -q"
	case strings.HasPrefix(name, "tag") && path != "snapshot":
		return "forkd images -q"
	case name == "images", name == "image":
		return "forkd image ls -q"
	}
	return ""
}

func bashScript(leaves []leaf) string {
	var b strings.Builder
	b.WriteString("_forkd() {\n  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} cmd=\"\" words=\"\" names=\"\" w\n")
	b.WriteString("  COMPREPLY=()\n  for w in \"${COMP_WORDS[@]:1:COMP_CWORD-1}\"; do\n    case \"$cmd $w\" in\n")
	var paths []string
	for _, l := range leaves[1:] {
		parent, name := cutLast(l.path)
		paths = append(paths, fmt.Sprintf("\"%s %s\"", parent, name))
	}
	fmt.Fprintf(&b, "      %s) cmd=\"${cmd:+$cmd }$w\" ;;\n    esac\n  done\n  case \"$cmd\" in\n", strings.Join(paths, "|"))
	for _, l := range leaves {
		fmt.Fprintf(&b, "    \"%s\") words=\"%s\"", l.path, strings.Join(l.words, " "))
		if l.names != "" {
			fmt.Fprintf(&b, "; names=\"%s\"", l.names)
		}
		b.WriteString(" ;;\n")
	}
	b.WriteString("  esac\n  case \"$cmd $prev\" in\n    \"snapshot --tag\"|\"branch --tag\"|\"snapshot-diff --tag\"|\"unpack --tag\"|*\" --to\") names=\"\" ;;\n")
	b.WriteString("    \"fork --from\"|*\" --from-sandbox\") words=\"\"; names=\"forkd ls -q\" ;;\n")
	b.WriteString("    *\" --tag\"|*\" --from\") words=\"\"; names=\"forkd images -q\" ;;\n")
	b.WriteString("    *\" --image\") words=\"\"; names=\"forkd image ls -q\" ;;\n  esac\n")
	b.WriteString("  [ -n \"$names\" ] && [ \"${cur#-}\" = \"$cur\" ] && words=\"$words $($names 2>/dev/null)\"\n")
	b.WriteString("  COMPREPLY=($(compgen -W \"$words\" -- \"$cur\"))\n}\ncomplete -o default -F _forkd forkd\n")
	return b.String()
}

// cutLast splits "image build" into "image" and "build".
func cutLast(path string) (parent, name string) {
	if i := strings.LastIndexByte(path, ' '); i >= 0 {
		return path[:i], path[i+1:]
	}
	return "", path
}

func fishScript(leaves []leaf) string {
	var b strings.Builder
	b.WriteString("complete -c forkd -f\n")
	root := leaves[0]
	groups := map[string]bool{}
	for _, l := range leaves[1:] {
		parent, name := cutLast(l.path)
		condition := "not __fish_seen_subcommand_from " + strings.Join(commands(root.words), " ")
		if parent != "" {
			condition = "__fish_seen_subcommand_from " + parent
			groups[parent] = true
		}
		fmt.Fprintf(&b, "complete -c forkd -n '%s' -a %s -d '%s'\n", condition, name, strings.ReplaceAll(l.help, "'", `\'`))
	}
	for _, l := range leaves[1:] {
		if groups[l.path] {
			continue
		}
		_, name := cutLast(l.path)
		for _, word := range l.words {
			if flag, ok := strings.CutPrefix(word, "--"); ok {
				fmt.Fprintf(&b, "complete -c forkd -n '__fish_seen_subcommand_from %s' -l %s\n", name, flag)
			}
		}
		if l.names != "" {
			fmt.Fprintf(&b, "complete -c forkd -n '__fish_seen_subcommand_from %s' -a '(%s 2>/dev/null)'\n", name, l.names)
		}
	}
	return b.String()
}

// commands are the words that aren't flags.
func commands(words []string) []string {
	return slices.DeleteFunc(slices.Clone(words), func(w string) bool { return strings.HasPrefix(w, "-") })
}
