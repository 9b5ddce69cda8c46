#!/bin/bash
# Measures forks of a Python + numpy snapshot with a daemon of its own, which is gone afterwards with all it kept but the image cache.
# Arguments are passed on to `forkd bench` (default: -n 100). `all DIR` measures everything that bench/README.md shows, into JSON files in DIR.
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
if [[ $1 != all ]]; then
  timeout 1200 "$forkd" bench "$@"
  exit
fi

out=$(realpath -m "${2:?all needs a directory for the results}")
mkdir -p "$out"
measure() { # NAME ARGUMENT...
  local name=$1
  shift
  echo "== $name: forkd bench $*" >&2
  timeout 1200 "$forkd" bench "$@" --json >"$out/$name.json"
}
measure fork fork --tag bench -n 100
measure branch-10 branch --tag bench --dirty-mib 10
measure branch-60 branch --tag bench --dirty-mib 60
measure fork-running fork-running --tag bench -n 5
measure chain-8 chain --tag bench --depth 8
measure chain-3 chain --tag bench --depth 3 --layer-mib 40
"$forkd" rmi bench
# 2 GiB, all of it resident: every page of the parent's memory was written once.
timeout 600 "$forkd" snapshot --tag large --image bench --mem-mib 2048 -q \
  --warm-up-eval 'import numpy; _all = numpy.ones(1500 << 20, "u1"); del _all' >/dev/null
measure branch-200-of-2048 branch --tag large --dirty-mib 200 --mode live
measure branch-60-of-2048 branch --tag large --dirty-mib 60 --mode live
