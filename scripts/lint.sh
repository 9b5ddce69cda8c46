#!/bin/bash
# The checks that need no test run: formatting, go vet, staticcheck.
set -euo pipefail
cd "$(dirname "$0")/.."

mapfile -t files < <(git ls-files -co --exclude-standard '*.go')
unformatted=$(gofmt -l "${files[@]}")
if [[ -n $unformatted ]]; then
  printf 'not formatted (run make fmt):\n%s\n' "$unformatted" >&2
  exit 1
fi
timeout -k 10 600 go vet ./...
timeout -k 10 900 go tool staticcheck ./...
