#!/bin/bash
# Measures forks of a Python + numpy snapshot with a daemon of its own, which is gone afterwards with all it kept but the image cache.
# Arguments are passed on to `forkd bench` (default: -n 100).
set -euo pipefail
cd "$(dirname "$0")/.."

forkd=$PWD/bin/forkd
dir=$(mktemp -d "${TMPDIR:-/tmp}/forkd-bench.XXXXXX")
export FORKD_URL=$dir/run/forkd.sock
[[ $# -gt 0 ]] || set -- -n 100

"$forkd" serve --data "$dir/data" --run "$dir/run" --cache "$FORKD_CACHE" --listen "" --log-level warn &
daemon=$!
finish() {
  status=$?
  trap - EXIT
  timeout 60 "$forkd" kill --all >/dev/null 2>&1 || true
  kill "$daemon" 2>/dev/null || true
  wait "$daemon" || true
  rm -rf "$dir"
  exit "$status"
}
trap finish EXIT
trap 'exit 130' INT TERM

for ((i = 0; ; i++)); do
  "$forkd" ls >/dev/null 2>&1 && break
  if ((i == 100)) || ! kill -0 "$daemon" 2>/dev/null; then
    echo "bench: the daemon did not start" >&2
    exit 1
  fi
  sleep 0.1
done

timeout 1800 "$forkd" image build bench --packages python3,python3-numpy -q >/dev/null
timeout 600 "$forkd" snapshot --tag bench --image bench --mem-mib 256 --warm-up-eval 'import numpy' -q >/dev/null
timeout 1200 "$forkd" bench --tag bench "$@"
