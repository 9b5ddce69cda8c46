#!/bin/bash
# Vets the code and runs every test, those with real virtual machines too. What was skipped is listed at the end with its reason.
# FORKD_VM_TESTS=0 leaves the virtual machines out.
set -euo pipefail
cd "$(dirname "$0")/.."
export FORKD_VM_TESTS=${FORKD_VM_TESTS-1}

timeout -k 10 600 go vet ./...

# Tests that run real machines, or Debian's tools over the network, come second and one package at a time: latencies are asserted, and
# two cores are easily kept busy. Those tests are told by this variable. What needs KVM, cgroup v2 or systemd comes third, in the lab where
# this host does not serve: a short set with each engine (make test-lab runs all of it).
mapfile -t slow < <(grep -rl --include='*_test.go' FORKD_VM_TESTS . | xargs -r dirname | sort -u)

run() {
  local status=0
  FORKD_VM_TESTS=0 timeout -k 30 1500 go test -json -timeout 20m ./... || status=1
  if [[ $FORKD_VM_TESTS == 1 && ${#slow[@]} -gt 0 ]]; then
    printf '\nwith real machines:\n'
    timeout -k 30 3000 go test -json -p 1 -timeout 45m "${slow[@]}" || status=1
    printf '\nwhat needs KVM, cgroup v2 or systemd:\n'
    bin/lab --limit 30m suite --short || status=1
  fi
  return "$status"
}

run | go run ./scripts/testsum
