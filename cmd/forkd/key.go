package main

// keyCmd is the group of commands for API keys.
type keyCmd struct {
	Create keyCreateCmd `cmd:"" help:"Make a key. It is shown once."`
	Ls     keyLsCmd     `cmd:"" help:"List the keys, without their secrets."`
	Revoke keyRevokeCmd `cmd:"" help:"Make keys good for nothing, at once."`
}
