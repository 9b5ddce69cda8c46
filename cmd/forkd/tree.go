package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/forkd/forkd/client"
)

type treeCmd struct {
	Tag string `arg:"" optional:"" help:"Only this snapshot and what rests on it."`
}

// Help says how a tree is read.
func (c *treeCmd) Help() string {
	return "A snapshot stands below the one it rests on. ON DISK is what it takes by itself: what changed. SANDBOXES are those that live or " +
		"are suspended and came of it."
}

// Run shows all snapshots as a tree.
func (c *treeCmd) Run(p *program) error {
	cl, err := p.client()
	if err != nil {
		return err
	}
	roots, err := cl.Tree(p.ctx)
	if err != nil {
		return err
	}
	if c.Tag != "" {
		node := findNode(roots, c.Tag)
		if node == nil {
			return &codedError{code: exitError, err: fmt.Errorf("no snapshot has the tag %s", c.Tag), hint: "`forkd tree` shows all"}
		}
		roots = []client.TreeNode{*node}
	}
	if p.cli.JSON {
		if roots == nil {
			roots = []client.TreeNode{}
		}
		return p.printJSON(roots)
	}
	return p.table([]string{"SNAPSHOT", "IMAGE", "MEMORY", "ON DISK", "STATUS", "CREATED", "SANDBOXES"}, treeRows(roots))
}

func findNode(nodes []client.TreeNode, tag string) *client.TreeNode {
	for i, n := range nodes {
		if n.Snapshot.Tag == tag {
			return &nodes[i]
		}
		if found := findNode(n.Children, tag); found != nil {
			return found
		}
	}
	return nil
}

func treeRows(roots []client.TreeNode) [][]string {
	var rows [][]string
	for _, n := range roots {
		rows = append(rows, treeRow("", n))
		rows = append(rows, branchRows("", n.Children)...)
	}
	return rows
}

// branchRows draws what rests on a snapshot. before is what stands left of it on each line.
func branchRows(before string, nodes []client.TreeNode) [][]string {
	var rows [][]string
	for i, n := range nodes {
		knee, below := "├─ ", "│  "
		if i == len(nodes)-1 {
			knee, below = "└─ ", "   "
		}
		rows = append(rows, treeRow(before+knee, n))
		rows = append(rows, branchRows(before+below, n.Children)...)
	}
	return rows
}

func treeRow(before string, n client.TreeNode) []string {
	s := n.Snapshot
	name := s.Tag
	if name == "" {
		name = "(" + s.ID + ")"
	}
	return []string{before + name, dash(s.Image), size(s.MemoryLogicalBytes), size(s.MemoryPhysicalBytes), snapshotStatus(s), ago(s.CreatedAtUnix), someOf(n.Sandboxes)}
}

// someOf names the first of many.
func someOf(ids []string) string {
	const shown = 3
	switch {
	case len(ids) == 0:
		return "-"
	case len(ids) <= shown:
		return strings.Join(ids, " ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(slices.Clone(ids[:shown]), " "), len(ids)-shown)
}
