package main

// imageCmd is the group of commands for images; each has a file of its own.
type imageCmd struct {
	Build imageBuildCmd `cmd:"" help:"Build an image from Debian packages, or from a root file system of your own."`
	Ls    imageLsCmd    `cmd:"" help:"List the images."`
	Rm    imageRmCmd    `cmd:"" help:"Remove images that no snapshot uses."`
	Share imageShareCmd `cmd:"" help:"Let all tenants use images."`
	Prune imagePruneCmd `cmd:"" help:"Remove images that lost their name to a newer one and that no snapshot uses."`
}
