#!/bin/bash
# Measures forks of a Python + numpy snapshot with a daemon of its own, which is gone afterwards with all it kept but the image cache.
# Arguments are passed on to `forkd bench` (default: -n 100). `all DIR` measures everything that bench/README.md shows, into JSON files in DIR.
# `networks DIR` measures claims with 300 networks ready and 60 sandboxes that have one, and without networks, in turn.
set -euo pipefail
cd "$(dirname "$0")/.."

forkd=$PWD/bin/forkd
dir=$(mktemp -d "${TMPDIR:-/tmp}/forkd-bench.XXXXXX")
[[ $# -gt 0 ]] || set -- -n 100

daemons=()
# A daemon is in a session of its own: ^C is for this script, which ends its machines first.
serve() { # NAME ARGUMENT...: starts a daemon, which what follows asks
  local name=$1
  shift
  export FORKD_URL=$dir/$name/run/forkd.sock
  setsid "$forkd" serve --data "$dir/$name/data" --run "$dir/$name/run" --cache "$FORKD_CACHE" --listen "" --log-level warn "$@" &
  daemons+=($!)
  for ((i = 0; ; i++)); do
    "$forkd" ls >/dev/null 2>&1 && break
    if ((i == 100)) || ! kill -0 "${daemons[-1]}" 2>/dev/null; then
      echo "bench: the daemon did not start" >&2
      exit 1
    fi
    sleep 0.1
  done
}
finish() {
  status=$?
  trap - EXIT
  for socket in "$dir"/*/run/forkd.sock; do
    timeout 60 "$forkd" --url "$socket" kill --all >/dev/null 2>&1 || true
  done
  for daemon in "${daemons[@]}"; do
    kill "$daemon" 2>/dev/null || true
    wait "$daemon" || true
  done
  rm -rf "$dir"
  exit "$status"
}
trap finish EXIT
trap 'exit 130' INT TERM

snapshot() { # TAG ARGUMENT...
  timeout 1800 "$forkd" image build bench --packages python3,python3-numpy -q >/dev/null
  timeout 600 "$forkd" snapshot --tag "$@" --image bench -q >/dev/null
}

if [[ $1 == networks ]]; then
  out=$(realpath -m "${2:?networks needs a directory for the results}")
  mkdir -p "$out"
  for kind in with without; do
    if [[ $kind == with ]]; then serve with --networking on --network-pool 300; else serve without --networking off; fi
    snapshot bench --mem-mib 256 --warm-up-eval 'import numpy'
    policy=()
    [[ $kind == without ]] || policy=(--network allow --allow 192.0.2.1:443/tcp)
    timeout 600 "$forkd" fork --tag bench -n 60 "${policy[@]}" -q >/dev/null
  done
  for round in 1 2 3; do
    for kind in with without; do
      timeout 600 "$forkd" --url "$dir/$kind/run/forkd.sock" bench --tag bench --only claim -n 4 --rounds 8 --json >"$out/$kind-network-$round.json"
    done
  done
  exit
fi

serve only
snapshot bench --mem-mib 256 --warm-up-eval 'import numpy'
if [[ $1 != all ]]; then
  timeout 1200 "$forkd" bench --tag bench "$@"
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
snapshot large --mem-mib 2048 \
  --warm-up-eval 'import numpy; _all = numpy.ones(1500 << 20, "u1"); del _all' >/dev/null
measure branch-200-of-2048 branch --tag large --dirty-mib 200 --mode live
measure branch-60-of-2048 branch --tag large --dirty-mib 60 --mode live
