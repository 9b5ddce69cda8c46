// Package lab is the test suite's machine with a working KVM and with cgroup v2: a Debian under QEMU's emulation, which emulates AMD's
// virtualisation extensions too. In it unmodified monitors run stock kernels on /dev/kvm. It is slow and honest: correctness and behaviour
// are tested there, speed is not.
//
// A Lab is what Open returns: one that is up already, of another process of this user, or one of our own. One lab runs at a time.
//
//	l, err := lab.Open(ctx, lab.Options{Cache: dir, Log: os.Stderr})  // errors.Is(err, lab.ErrUnavailable): this host can't, and why
//	err = l.Put(ctx, "bin/forkd", "/work/bin/forkd")
//	code, err := l.Run(ctx, lab.Command{Args: []string{"forkd", "doctor"}, Stdout: os.Stdout, Stderr: os.Stderr})
//	err = l.Close()                                                   // ends our own, once the commands of others have ended
//
// What is built (build.go) are four plain files in the cache: the outer QEMU, and the lab's kernel, initramfs and root. While a lab runs it
// has no file of its own: its scratch disk has no name, its sockets are inherited or abstract, and the outer QEMU lives in a root in memory
// that its mount namespace alone sees. It is process 1 of a PID namespace and dies with the thread that started it. So nothing is left
// whichever way its driver ends.
//
// This package is part of the test suite, never of the product.
package lab
