# Everything a user tries and a developer does, as one word each: `make help`.
#
# Nothing here needs preparation: a target installs what it is missing, into .venv
# (Python packages) and .tools (other programs), and says so while it does. Both are
# below this folder and nowhere else, but for Chromium, which `make test-all` takes
# from apt. What is installed already costs nothing the next time.

.DEFAULT_GOAL := help
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory
# Steps follow each other: the quick ones come first, so that they fail first. Tests
# use the cores by themselves.
.NOTPARALLEL:

# Programs that were installed for this tree go before those of the machine.
export PATH := $(CURDIR)/.tools/bin:$(CURDIR)/.venv/bin:$(PATH)

# What a user may set on the command line:
ARGS   ?=        # for demo, run and bench: more arguments for the program
TESTS  ?=        # for test-fast, test-integration, test-e2e: arguments for pytest
JOBS   ?= 2      # how many tests at a time

# `make -C` and comments above leave blanks behind the values.
override ARGS  := $(strip $(ARGS))
override TESTS := $(strip $(TESTS))
override JOBS  := $(strip $(JOBS))

# What the tests of a file share is made once: a file is not divided.
PYTEST  := pytest -n $(JOBS) --dist loadfile

##@ Use

.PHONY: help
help: ## Show this list
	@awk 'BEGIN { FS = ":.*## " } \
	  /^##@/ { printf "\n%s\n", substr($$0, 5) } \
	  /^[a-z0-9-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo

.PHONY: demo
demo: install-runtime ## Try it without a GPU: a recorded host, replayed (ARGS="--help")
	@mps-exporter demo $(ARGS)

.PHONY: run
run: install-runtime ## Run it on this machine, against its GPUs and its MPS (ARGS="--help")
	@mps-exporter $(ARGS)

# make would end with 2 whatever doctor's exit status is.
.PHONY: doctor
doctor: install-runtime ## Diagnose this machine, or one process (PID=N)
	@mps-exporter doctor $(if $(filter undefined,$(origin PID)),,--pid=$(PID)) $(ARGS) || echo "(exit status of doctor: $$?)"

##@ Develop

.PHONY: install
install: ## Install the package and all development tools into .venv
	@tools/install-python.sh dev

.PHONY: format
format: install ## Format the code, and fix what has a safe fix
	ruff format .
	ruff check --fix .

.PHONY: lint
lint: lint-python lint-files ## All lints: code, types, who imports whom, YAML, shell, spelling

.PHONY: lint-python
lint-python: install
	ruff check .
	ruff format --check .
	mypy
	lint-imports

.PHONY: lint-files
lint-files: install
	@tools/lint-files.sh

##@ Test

.PHONY: test
test: ## Lint, all quick tests, those against real servers
	@# Meanwhile the servers are fetched, which waits for the network and needs one core.
	@$(MAKE) tools-servers & $(MAKE) lint test-fast || { wait; exit 1; }; wait
	@$(MAKE) test-integration

.PHONY: test-fast
test-fast: install ## Only the quick tests (TESTS="-k name")
	$(PYTEST) tests/unit $(TESTS)

.PHONY: golden
golden: install ## Accept what the recordings show now; git diff shows what has changed
	@python -m testing.golden

# The tests of a file share servers that take a minute to fill, so a file is not divided.
.PHONY: test-integration
test-integration: install tools-servers ## Only the tests against real servers: Prometheus, Alertmanager
	@# They wait more than they compute: one more at a time than there are cores.
	pytest -n $$(($(JOBS) + 1)) --dist loadscope --no-loadscope-reorder tests/integration $(TESTS)

# Not part of `make test`: before Python 3.12, watching the branches doubles the time. Every Python
# process that a test starts, workers and programs alike, starts `coverage` where this is set.
.PHONY: coverage
coverage: export COVERAGE_PROCESS_START := $(CURDIR)/pyproject.toml
coverage: ## Run them again and tell which branches they do not reach
	@coverage erase
	@$(MAKE) test-fast test-integration
	@coverage combine --quiet
	@coverage report

# Not part of `make test`: one module takes minutes. It changes a copy of what is committed.
.PHONY: mutants
mutants: install ## Does a test of TESTS fail for each change? (MODULE=exporter/mps_exporter/humanize.py)
	@pip install -q 'cosmic-ray>=8.4,<9'
	@rm -rf build/mutants* && mkdir -p build && git clone -q . build/mutants
	@printf '%s\n' '[cosmic-ray]' 'module-path = "$(MODULE)"' 'timeout = 60.0' 'excluded-modules = []' \
	  'test-command = "python -m pytest -q -x $(or $(TESTS),tests/unit)"' \
	  '[cosmic-ray.distributor]' 'name = "local"' >build/mutants/mutants.toml
	@cd build/mutants && cosmic-ray init mutants.toml mutants.sqlite && \
	  cosmic-ray exec mutants.toml mutants.sqlite && cr-report --show-diff --surviving-only mutants.sqlite

# Kept apart for what they need: minutes to build tools, or to measure; a browser.
.PHONY: test-e2e
test-e2e: install tools ## Only the tests that need helm, kubeconform, vmalert, Chromium
	pytest $(wildcard tests/e2e) tests/browser $(TESTS)

.PHONY: test-all
test-all: test test-e2e package ## Everything that CI runs

.PHONY: bench
bench: install ## Measure how long things take (ARGS="--help")
	@python -m bench $(ARGS)

.PHONY: simulate
simulate: install ## Play simulated MPS hosts, and compare with what is true (ARGS="--help")
	@python -m testing.world $(ARGS)

# Nothing here builds Grafana: GRAFANA=/usr/share/grafana names one that is installed or unpacked.
.PHONY: pictures
pictures: install tools-servers ## Look at the dashboards in a real Grafana (GRAFANA=/its/folder ARGS="FOLDER --scenario tour")
	@tools/install-system.sh chromium
	python -m grafana.pictures $(or $(ARGS),build/pictures)

.PHONY: page-pictures
page-pictures: install ## Draw the status page in each situation (ARGS="FOLDER NAME...")
	@tools/install-system.sh chromium
	python -m tests.browser.pictures $(or $(ARGS),build/page-pictures)

# Two minutes: as long as the demo takes.
.PHONY: film
film: install ## Film the demo's page and terminal, into docs/images
	@tools/install-system.sh chromium webp
	python -m tests.browser.pictures --film

.PHONY: images
images: install tools-servers ## Make the pictures of docs/images: of dashboards (GRAFANA=/its/folder)
	@tools/install-system.sh chromium
	python -m grafana.pictures build/pictures --images docs/images

##@ Programs that tests run, into .tools

.PHONY: tools
tools: ## All of them: the servers, VictoriaMetrics, AppArmor's parser, Chromium, Go tools
	@tools/install-system.sh servers victoria apparmor chromium
	@tools/install-go-tools.sh

.PHONY: tools-servers
tools-servers: ## Prometheus of two ages and Alertmanager, from Debian packages
	@tools/install-system.sh servers

##@ Publish

.PHONY: package
package: install ## Build sdist and wheel into dist, and try the wheel in a fresh environment
	@tools/check-package.sh

# Twice, and compares: the same tree gives the same files. The workflow release.yml publishes them.
.PHONY: release-check
release-check: install ## Build all that a release publishes but the image, twice, into build/release
	@tools/release-check.sh build/release

# gpg has the KEY; build/repository is for the web server at URL, and keeps older packages.
.PHONY: repository
repository: install ## Lay the built packages out for apt and yum, signed (URL=https://... KEY=me@example.org)
	@tools/repository.sh build/repository "$(URL)" "$(KEY)" build/release/*.deb build/release/*.rpm

# As root: makes fresh Debian systems with debootstrap and boots them in namespaces.
.PHONY: try-packages
try-packages: ## Install, use and remove the Debian package on fresh systems (SUITES="bookworm trixie")
	@for suite in $(or $(SUITES),bookworm trixie); do \
	  tools/try-package.sh $$suite build/release/mps-exporter_*_$$(dpkg --print-architecture).deb; done

.PHONY: lock
lock: ## Pin the dependencies again (UPGRADE=1: to their newest versions)
	@tools/lock.sh $(if $(UPGRADE),--upgrade)

##@ Clean

.PHONY: clean
clean: ## Remove what tests and builds leave behind
	rm -rf dist build .coverage .coverage.* htmlcov coverage.xml \
	  .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -not -path './.tools/*' -prune -exec rm -rf {} +

.PHONY: clean-tools
clean-tools: clean ## Remove that, .venv and .tools
	rm -rf .venv .tools

# The least that the exporter needs: the locked dependencies and the package itself.
.PHONY: install-runtime
install-runtime:
	@tools/install-python.sh runtime
