#!/bin/bash
# Installs what forkd needs and this machine lacks, from Debian's packages. Silent when nothing is missing.
set -euo pipefail

# command:package. A command that is there is enough, wherever it came from.
needs=(
  qemu-system-x86_64:qemu-system-x86
  mmdebstrap:mmdebstrap
  mkfs.erofs:erofs-utils
  ip:iproute2
  nft:nftables
  gpgv:gpgv
  git:git
)

missing=()
for need in "${needs[@]}"; do
  PATH=$PATH:/usr/sbin:/sbin command -v "${need%%:*}" >/dev/null || missing+=("${need#*:}")
done
[[ -e /usr/share/keyrings/debian-archive-keyring.gpg ]] || missing+=(debian-archive-keyring)
[[ -e /etc/ssl/certs/ca-certificates.crt ]] || missing+=(ca-certificates)

if ! PATH=$PATH:/usr/local/go/bin command -v go >/dev/null; then
  echo "install-deps: no go command in PATH or /usr/local/go/bin: install the Go release that go.mod names" >&2
  exit 1
fi
if [[ ${#missing[@]} -eq 0 ]]; then
  exit 0
fi

install=(apt-get install -y -q --no-install-recommends -o DPkg::Lock::Timeout=120 "${missing[@]}")
if [[ $EUID -ne 0 ]]; then
  echo "install-deps: missing packages; run: sudo apt-get update && sudo ${install[*]}" >&2
  exit 1
fi

export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
echo "install-deps: installing ${missing[*]}"
if ! timeout -k 10 600 "${install[@]}" </dev/null >"$log" 2>&1; then
  echo "install-deps: refreshing the package lists"
  if ! timeout -k 10 300 apt-get update -q </dev/null >"$log" 2>&1 ||
    ! timeout -k 10 900 "${install[@]}" </dev/null >>"$log" 2>&1; then
    cat "$log" >&2
    echo "install-deps: could not install ${missing[*]}; try: ${install[*]}" >&2
    exit 1
  fi
fi
echo "install-deps: done"
