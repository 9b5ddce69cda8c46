# forkd: build, test and show it. `make help` lists the targets.
#
# What is downloaded or built once (kernels, base root file systems, images for tests and the demo) is kept in
# ${FORKD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/forkd}; it may be deleted at any time.

SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS   += --no-builtin-rules

export PATH        := $(PATH):/usr/local/go/bin
export CGO_ENABLED := 0
export FORKD_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/forkd

GO      ?= go
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
LDFLAGS := -s -w -X main.version=$(VERSION)
AGENT   := internal/image/agentbin/forkd-agent
# Arguments for `make demo` and `make bench`.
ARGS    ?=

.PHONY: all
all: build

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  %-16s %s\n", $$1, $$2}'

.PHONY: deps
deps: ## install what is missing from Debian's packages
	@scripts/install-deps.sh

# The agent carries no version of the commit: images are rebuilt when its code changes, not at every commit.
.PHONY: agent
agent: ## build the guest's agent, which the host binary embeds
	@timeout -k 10 600 $(GO) build -trimpath -buildvcs=false -ldflags '-s -w' -o $(AGENT) ./cmd/forkd-agent

.PHONY: build
build: agent ## build bin/forkd
	@timeout -k 10 600 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o bin/forkd ./cmd/forkd

.PHONY: test
test: deps build lab-tool ## install what is missing, then run all tests, those with real virtual machines too
	@scripts/test.sh

# The complete set in the lab, where this host has no KVM that works or no cgroup v2. It takes long in the lab.
.PHONY: test-lab
test-lab: deps build lab-tool ## run all tests that need KVM, cgroup v2 or systemd, with each engine (FORKD_FIRECRACKER=FILE)
	@bin/lab --limit 6h suite | $(GO) run ./scripts/testsum

.PHONY: test-firecracker
test-firecracker: deps build lab-tool ## the same with Firecracker alone, which has to be at hand (FORKD_FIRECRACKER=FILE)
	@bin/lab --limit 4h suite --engine firecracker --require | $(GO) run ./scripts/testsum

.PHONY: lab-tool
lab-tool: agent
	@timeout -k 10 600 $(GO) build -trimpath -o bin/lab ./test/lab/cmd/lab

# No timeout(1) before these: the terminal and its ^C are for the program, which has a limit of its own.
export CMD
.PHONY: lab
lab: deps build lab-tool ## run a command in a VM with a working KVM (CMD='forkd doctor'; docs/guide/lab.md)
	@bin/lab run --put bin/forkd -- sh -c "$${CMD:?give a command, as in: make lab CMD=\"forkd doctor\"}"

.PHONY: lab-shell
lab-shell: deps build lab-tool ## open a shell in that VM
	@bin/lab shell --put bin/forkd

.PHONY: lab-guide
lab-guide: deps build lab-tool ## do what docs/guide/firecracker.md says, in that VM; FORKD_FIRECRACKER names a Firecracker
	@bin/lab suite --where lab --engine firecracker --require --run '^TestFirecrackerGuide$$' | $(GO) run ./scripts/testsum

.PHONY: demo
demo: deps build ## fork a warmed Python + numpy machine and print what it cost (ARGS="--json -n 10")
	@timeout -k 30 3000 bin/forkd demo $(ARGS)

.PHONY: bench
bench: deps build ## measure 100 forks, cold and from a pool (ARGS go to forkd bench)
	@timeout -k 30 3600 scripts/bench.sh $(ARGS)

.PHONY: lint
lint: ## gofmt, go vet, staticcheck
	@scripts/lint.sh

.PHONY: fmt
fmt: ## format all Go files
	@gofmt -w $$(git ls-files -co --exclude-standard '*.go')

.PHONY: generate
generate: ## regenerate what is generated from api/ (the output is checked in)
	@timeout -k 10 600 $(GO) generate ./...

.PHONY: clean
clean: ## remove what was built here; the cache stays
	@rm -rf bin $(AGENT)
