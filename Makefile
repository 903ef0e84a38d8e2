# mypr-mcp: build, run, test. "make help" lists the targets.

# One set of flags for everything: another one compiles the dependencies again (a
# minute for SQLite alone). Only the race detector needs cgo.
export GOFLAGS := -trimpath
export CGO_ENABLED := 0
export PATH := $(PATH):$(CURDIR)/test/node_modules/.bin
GO      := go
BIN     := bin/mypr-mcp
LDFLAGS := -s -w
PREFIX  ?= $(HOME)/.local
# What "make run" runs, and where.
CODE ?= import sys, os; print("Python", sys.version.split()[0], "in", os.getcwd()); 6 * 7
DIR  ?= $(CURDIR)

# A test's children leave at once: the race detector would let each sleep for a second.
RACE := GORACE=atexit_sleep_ms=0
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
FUZZTIME    ?= 2000x
# What "make test" runs, in this order and SIDE_BY_SIDE at a time: most of it waits.
SIDE_BY_SIDE ?= 2
STAGES := test-go test-containers test-faults test-e2e test-systemd test-python test-uml test-faults-kernel test-fuzz test-differential lint

.PHONY: help build run test compile lint bench install clean setup test-go test-fuzz test-python test-e2e test-systemd test-differential test-containers test-faults test-faults-kernel test-uml faults

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 20

build: ## build bin/mypr-mcp
	@mkdir -p bin
	$(GO) build -buildvcs=auto -ldflags '$(LDFLAGS)' -o $(BIN) ./cmd/mypr-mcp

# The session outlives make and keeps its environment: not with what is exported above.
run: build ## run a cell in the session of DIR (default: here): make run CODE='1+1'
	env -u GOFLAGS -u CGO_ENABLED -u MAKEFLAGS -u MFLAGS -u MAKELEVEL $(BIN) -C "$(DIR)" exec '$(subst ','\'',$(value CODE))'

test: ## install what the tests need and run all of them
	@test/stages.sh 3 setup build compile
	@test/stages.sh $(SIDE_BY_SIDE) $(STAGES)
	@echo "=== $$(date +%T) all passed"

# Beside setup, which may be installing the C compiler that the race detector needs.
compile: # what the stages with the race detector would compile by themselves
	@! command -v gcc >/dev/null || CGO_ENABLED=1 $(GO) build -race ./internal/... ./kernel/... ./supervisor/... ./units/...

setup: ## install what the tests need (test/.venv*, test/node_modules)
	@test/setup.sh

lint: ## gofmt, go vet, staticcheck, ruff, mypy
	@out=$$(gofmt -l $$(git ls-files '*.go')); if [ -n "$$out" ]; then echo "gofmt would change:"; echo "$$out"; exit 1; fi
	$(GO) vet ./...
	$(GO) run $(STATICCHECK) ./...
	@if [ -x test/.venv/bin/ruff ]; then cd kernel/python && ../../test/.venv/bin/ruff check . && ../../test/.venv/bin/mypy mypr_kernel; \
	else echo "ruff and mypy are not installed: make setup"; fi

# The last packages take longest: they come first.
test-go: ## Go tests with the race detector (without test/e2e)
	CGO_ENABLED=1 $(RACE) test/report.sh $(GO) test -race -vet=off -timeout 10m $$($(GO) list ./... | grep -v '/test/' | tac)

test-fuzz: ## FUZZTIME inputs for each fuzz target
	@test/fuzz.sh $(FUZZTIME)

test-python: ## kernel tests on the oldest and the newest Python
	@test/python.sh

test-faults: build ## faults in CI: survival, upgrades, recovery times, 30 random faults
	$(GO) run ./test/faults -bin $(BIN) -seed 1 -n 30 -sleep 15 -rounds 3 survive upgrade leftovers recovery soak

test-faults-kernel: build ## faults in CI: 30 random ones that kill kernels too, and without cgroups
	$(GO) run ./test/faults -bin $(BIN) -seed 2 -n 30 -kernel soak
	MYPR_TIER=3 $(GO) run ./test/faults -bin $(BIN) -seed 3 -n 15 -sleep 15 -kernel survive soak

test-uml: build ## faults and limits on a second kernel, User-Mode Linux, with the cgroup controllers
	$(GO) run ./test/faults -bin $(BIN) uml

faults: build ## 300 random faults, then 300 with kernels killed too, and what survives what
	$(GO) run ./test/faults -bin $(BIN) -n 300 soak
	$(GO) run ./test/faults -bin $(BIN) -n 300 -kernel soak
	$(GO) run ./test/faults -bin $(BIN) survive upgrade leftovers recovery uml

test-e2e: build ## the built program with real MCP clients
	CGO_ENABLED=1 $(RACE) MYPR_BIN="$(CURDIR)/$(BIN)" test/report.sh $(GO) test -race -vet=off -count=1 -timeout 20m ./test/e2e ./test/rules

test-systemd: build ## the built program under a real systemd --user, and a booted systemd
	MYPR_BIN="$(CURDIR)/$(BIN)" test/report.sh $(GO) test -vet=off -count=1 -timeout 15m ./test/systemd/...

test-differential: ## the same units under a real systemd --user and under our supervisor
	test/report.sh $(GO) test -vet=off -count=1 -timeout 15m ./test/differential
	MYPR_TIER=3 test/report.sh $(GO) test -vet=off -count=1 -timeout 15m ./test/differential

test-containers: build ## the built program in containers of podman, in bubblewrap and in bare namespaces
	MYPR_BIN="$(CURDIR)/$(BIN)" test/report.sh $(GO) test -vet=off -count=1 -parallel 4 -timeout 15m ./test/containers

bench: build ## measure against the floors, side by side
	MYPR_BIN="$(CURDIR)/$(BIN)" $(GO) run ./test/bench

install: build ## install to PREFIX/bin (default ~/.local/bin)
	install -D -m 0755 $(BIN) "$(PREFIX)/bin/mypr-mcp"

clean: ## remove what build and test made
	rm -rf bin dist test/.venv test/.venv-oldest test/node_modules
