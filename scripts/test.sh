#!/bin/bash
# Vets the code and runs every test, those with real virtual machines too. What was skipped is listed at the end with its reason.
# FORKD_VM_TESTS=0 leaves the virtual machines out.
set -euo pipefail
cd "$(dirname "$0")/.."
export FORKD_VM_TESTS=${FORKD_VM_TESTS-1}

timeout -k 10 600 go vet ./...

# The real machines come second and alone: their latencies are asserted, and two cores are easily kept busy.
mapfile -t fast < <(go list ./... | grep -v '/test/e2e' || true)
status=0
FORKD_VM_TESTS=0 timeout -k 30 1500 go test -json -timeout 20m "${fast[@]}" | go run ./scripts/testsum || status=1
if [[ $FORKD_VM_TESTS == 1 && -n $(ls test/e2e/*_test.go 2>/dev/null) ]]; then
  timeout -k 30 3000 go test -json -count=1 -p 1 -timeout 45m ./test/e2e/... | go run ./scripts/testsum || status=1
fi
exit "$status"
