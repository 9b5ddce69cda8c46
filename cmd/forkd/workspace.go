package main

// workspaceCmd is the group of commands for sandboxes that are known by a name.
type workspaceCmd struct {
	Create  workspaceCreateCmd  `cmd:"" help:"Start a sandbox with a name."`
	Ls      workspaceLsCmd      `cmd:"" help:"List the workspaces."`
	Suspend workspaceSuspendCmd `cmd:"" help:"Freeze workspaces to disk and give their memory back."`
	Resume  workspaceResumeCmd  `cmd:"" help:"Bring suspended workspaces back."`
	Rm      workspaceRmCmd      `cmd:"" help:"End workspaces, running or suspended."`
}
