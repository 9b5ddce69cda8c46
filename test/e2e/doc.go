// Package e2e tests forkd as its users meet it: a daemon that is a process of its own, real virtual machines, and no way in but
// the public client, HTTP and the command line. It is for what only shows when all parts are there: state that must not leak
// between siblings, identities, crashes at any moment, hostile input, leaks over time.
//
// Nothing runs unless FORKD_VM_TESTS=1: plain `go test ./...` boots no machine. FORKD_CACHE says where images are kept from one run to
// the next; FORKD_SOAK how long the soak test goes on (default 30s); FORKD_E2E_SEED a directory in which the warmed snapshot that the
// tests share is kept, for whoever works on the tests. Longer versions of the tests of the snapshot graph are had with FORKD_BRANCHES (branches
// in each mode that are checked for being of one instant; default 4), FORKD_TREE_STEPS and FORKD_TREE_DEPTH (what is done at random to a graph,
// and how deep it gets at least; 20 and 5), FORKD_SUSPENDED (sandboxes that are suspended together; 6), and FORKD_EVERY_POINT=1 (kills at every
// point in every mode, also where a mode goes the way of another one). FORKD_TREE_SEED repeats what an earlier run did at random: it is printed.
// FORKD_E2E_ENGINE=qemu-kvm or =firecracker runs the machines on those instead of TCG, and FORKD_E2E_IMAGES is a directory of images to take instead
// of building some: so the tests run in the KVM lab (test/lab), where there is no network. FORKD_E2E_SMALL=1 makes fewer of everything,
// FORKD_E2E_PATIENCE=4 waits four times as long for what hangs, and FORKD_E2E_SYSTEMD names a directory with units that may be installed.
//
// The lab (lab_test.go) makes one image and one warmed snapshot, the seed, with a daemon of its own. Every other daemon starts on a
// copy of that data whose large files are hard links, so that only the first one pays for a boot. Tests that change nothing of the
// daemon share one; the others have one each. When a test fails it prints the daemon's log of its time and the guests' consoles, and at
// the end of each test, and once more of all, the lab looks for processes, directories and mounts that were left over.
//
// Latencies are not asserted here: the machine may be busy with anything. That is what bench/ is for.
package e2e
