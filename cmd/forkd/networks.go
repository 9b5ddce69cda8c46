package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"

	"github.com/forkd/forkd/internal/hostnet"
	"github.com/forkd/forkd/internal/netpolicy"
	"github.com/forkd/forkd/internal/sandbox"
)

// Values of --networking but auto.
const (
	networkingOn  = "on"
	networkingOff = "off"
)

// openNetworks makes networks possible, unless that was not asked for, or is not to be had and not insisted on: it returns nil then.
func (d *daemon) openNetworks(f *daemonFlags, possible bool, log *slog.Logger) (sandbox.Networks, error) {
	if f.Networking == networkingOff || !possible {
		d.noNetworks = errors.New("the daemon was started with --networking off")
		return nil, nil
	}
	prefix, err := netip.ParsePrefix(f.NetworkRange)
	if err != nil {
		return nil, badUsage("give a /16 such as 10.118.0.0/16", "--network-range %s: %v", f.NetworkRange, err)
	}
	// These directories are this daemon's alone, and stay the same when it starts again.
	sum := sha256.Sum256([]byte(f.Data + "\x00" + f.RunDir))
	d.networks, err = hostnet.Open(hostnet.Config{Name: fmt.Sprintf("forkd-%x", sum[:6]), Range: prefix, Ready: f.NetworkPool, Servers: f.DNS, Log: log})
	switch {
	case err == nil:
		d.closers = append(d.closers, d.networks.Close)
		return networkService{d.networks}, nil
	case f.Networking == networkingOn:
		return nil, fmt.Errorf("networks were asked for: %w", err)
	}
	log.Warn("machines have no networks on this host", "error", err)
	d.networks, d.noNetworks = nil, err
	return nil, nil
}

// networkService is hostnet as the domain wants it.
type networkService struct{ *hostnet.Network }

// Acquire implements sandbox.Networks.
func (s networkService) Acquire(ctx context.Context) (sandbox.Network, error) {
	slot, err := s.Network.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	return slot, nil
}

// Adopt implements sandbox.Networks.
func (s networkService) Adopt(pid int, p netpolicy.Policy) (sandbox.Network, error) {
	slot, err := s.Network.Adopt(pid, p)
	if err != nil || slot == nil {
		return nil, err
	}
	return slot, nil
}

// KernelWord implements sandbox.Networks.
func (networkService) KernelWord() string { return hostnet.KernelWord() }
