#!/bin/bash
# Vets the code and runs every test, those with real virtual machines too. What was skipped is listed at the end with its reason.
# FORKD_VM_TESTS=0 leaves the virtual machines out.
set -euo pipefail
cd "$(dirname "$0")/.."
export FORKD_VM_TESTS=${FORKD_VM_TESTS-1}

timeout -k 10 600 go vet ./...

# Tests that run real machines, or Debian's tools over the network, come second and one package at a time: two cores are easily kept busy.
# Those tests are told by this variable. Beside all that runs, in what time the others leave, a short set of what needs KVM, cgroup v2 or
# systemd: in the lab, where this host does not serve (make test-lab runs all of it).
mapfile -t slow < <(grep -rl --include='*_test.go' FORKD_VM_TESTS . | xargs -r dirname | sort -u)
lab=$(mktemp)
trap 'rm -f "$lab"' EXIT

run() {
  local status=0 beside=
  if [[ $FORKD_VM_TESTS == 1 ]]; then
    nice -n 19 bin/lab --limit 40m suite --short >"$lab" 2>&1 &
    beside=$!
  fi
  FORKD_VM_TESTS=0 timeout -k 30 1500 go test -json -timeout 20m ./... || status=1
  if [[ $FORKD_VM_TESTS == 1 && ${#slow[@]} -gt 0 ]]; then
    printf '\nwith real machines:\n'
    timeout -k 30 3000 go test -json -p 1 -timeout 45m "${slow[@]}" || status=1
  fi
  if [[ -n $beside ]]; then
    wait "$beside" || status=1
    printf '\nwhat needs KVM, cgroup v2 or systemd:\n'
    cat "$lab"
  fi
  return "$status"
}

run | go run ./scripts/testsum
