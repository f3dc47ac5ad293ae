# The commands of the project; `make help` lists them. Everything they need, they install into .venv.
.DEFAULT_GOAL := help
.PHONY: help setup model demo up down status logs lint lint-types lint-rest test bench-flip bench-switch bench-directory bench-begin \
  bench-engine bench-kv bench-fit bench-split bench-fidelity bench-sim paper images gen pin proto-baseline clean

PYTHON ?= python3
BIN := .venv/bin
SERVICES := gateway planner directory node_agent
MODEL := build/models/smollm2-135m-instruct
COMPILED := build/compiled
export PIP_DISABLE_PIP_VERSION_CHECK := 1

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/.ready ## install everything into .venv

.venv/.ready: constraints.txt Makefile deploy/setup/debian.sh $(wildcard libs/*/pyproject.toml services/*/pyproject.toml)
	@deploy/setup/debian.sh
	@echo "setup: creating .venv and installing about 3.5 GB of packages (torch, SGLang, Mooncake and ours): 2 to 10 minutes"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "setup: Python 3.11 or newer is needed; say which with make PYTHON=python3.11" >&2; exit 1; }
	@# Python compiles a module when it is first imported; of these 23,000 most never are.
	@$(BIN)/pip install -q --no-compile -c constraints.txt setuptools wheel
	@$(BIN)/pip install -q --no-compile --no-warn-conflicts --no-build-isolation -c constraints.txt \
	  -e libs/common -e libs/client -e libs/sim -e libs/replay \
	  $(foreach service,$(filter-out node_agent,$(SERVICES)),-e services/$(service)) -e 'services/node_agent[sglang]' \
	  -r deploy/setup/dev-requirements.txt
	@$(BIN)/pip install -q --no-compile --no-deps -c constraints.txt sglang torchvision ai-dynamo-runtime
	@touch $@

.venv-gen/.ready: protos/gen-requirements.txt
	@test -x .venv-gen/bin/python || $(PYTHON) -m venv .venv-gen
	@.venv-gen/bin/pip install -q -r protos/gen-requirements.txt
	@touch $@

model: $(MODEL)/.ready ## fetch the small model and convert it

$(MODEL)/.ready: .venv/.ready deploy/model/prepare.py
	@$(BIN)/python deploy/model/prepare.py smollm2 --out $(MODEL)
	@touch $@

demo: $(MODEL)/.ready ## play an agent's session on a cluster of three nodes (KEEP=1 leaves it running)
	@$(BIN)/python deploy/local/demo.py $(if $(KEEP),--keep)

up: $(MODEL)/.ready ## start etcd, the four services and three nodes on this machine
	@$(BIN)/python deploy/local/control.py up

down: ## stop them
	@$(BIN)/python deploy/local/control.py down

status: ## show them
	@$(BIN)/python deploy/local/control.py status

logs: ## follow their logs
	@$(BIN)/python deploy/local/control.py logs

$(COMPILED)/.ready: libs/sim/compile.py $(shell find libs/common/src/evolving libs/sim/src/evolving_sim -name '*.py') | .venv/.ready
	@command -v gcc >/dev/null && test -f "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" \
	  || deploy/setup/debian.sh gcc libc6-dev python3-dev
	@$(BIN)/python libs/sim/compile.py $(COMPILED)

lint: .venv/.ready .venv-gen/.ready ## formatting, types, import rules, protos
	@$(MAKE) -j2 -O --no-print-directory lint-types lint-rest

lint-types:
	@$(BIN)/mypy
	@$(BIN)/python libs/sim/compile.py build/compilable --check

lint-rest:
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-cache
	@.venv-gen/bin/buf lint protos
	@.venv-gen/bin/buf breaking protos --against protos/baseline.binpb
	@rm -rf build/gen && protos/gen.sh build/gen 2>/dev/null && \
	  for f in $$(cd build/gen && find . -name '*_pb2*'); do cmp -s build/gen/$$f libs/common/src/$$f || \
	  { echo "lint: $$f is stale: run make gen" >&2; exit 1; }; done

test: $(MODEL)/.ready ## every test, real engines included
	@$(BIN)/pytest -q $(ARGS)

bench-flip: $(MODEL)/.ready ## gaps between tokens with and without a role switch, into build/bench-flip.json
	@$(BIN)/python tests/bench/bench_flip.py $(ARGS)

bench-switch: $(MODEL)/.ready ## what role switches take and lose under load, ours and SGLang's own (25 minutes; ARGS=--quick: fewer), into build/bench-switch.json
	@$(BIN)/python tests/bench/bench_switch.py $(ARGS)

bench-directory: .venv/.ready ## the directory's core beside Dynamo's tree (ARGS=--size: 20 M copies), into build/bench-directory.json
	@mkdir -p build
	@$(BIN)/python tests/bench/bench_directory.py --json build/bench-directory.json $(ARGS)

bench-begin: .venv/.ready ## time of Begin and routing by context length, into build/bench-begin.json
	@mkdir -p build
	@$(BIN)/python tests/bench/bench_begin.py --json build/bench-begin.json $(ARGS)

bench-engine: $(MODEL)/.ready ## our engine against plain SGLang, and what reuse saves, into build/bench-engine.json
	@$(BIN)/python tests/bench/bench_engine.py $(ARGS)

bench-kv: .venv/.ready ## reuse lost by policy and pool size, and hidden fetches: TRACE=FILE [QUICK=1], into build/bench-kv.json
	@$(BIN)/python tests/bench/bench_kv.py --trace $(TRACE) $(if $(QUICK),--quick)

bench-fit: $(MODEL)/.ready ## how well the time model fitted under load tells what it was not fitted to (25 minutes), into build/bench-fit.json
	@$(BIN)/python tests/bench/bench_fit.py $(ARGS)

bench-split: $(COMPILED)/.ready ## whether the planner finds the split that serves most, simulated (a quarter of an hour; ARGS="--seed 2"), into build/bench-split.json
	@PYTHONPATH=$(COMPILED) $(BIN)/python tests/bench/bench_split.py $(ARGS)

paper: $(if $(findstring --quick,$(ARGS)),.venv/.ready,$(COMPILED)/.ready) ## the paper's tables beside simulated ones (an hour on two cores; ARGS=--quick: two minutes), into build/paper
	@$(if $(findstring --quick,$(ARGS)),,PYTHONPATH=$(COMPILED)) $(BIN)/evolving-sim paper $(ARGS)

bench-fidelity: .venv/.ready ## one trace on the live mock cluster and simulated, request beside request: TRACE=FILE [QUICK=1], into build/bench-fidelity.json
	@$(BIN)/python tests/bench/bench_fidelity.py --trace $(TRACE) $(if $(QUICK),--quick)

bench-sim: $(COMPILED)/.ready ## how fast the simulator is, beside Dynamo's replay and at 3,072 GPUs: TRACE=FILE [QUICK=1], into build/bench-sim.json
	@PYTHONPATH=$(COMPILED) $(BIN)/python tests/bench/bench_sim.py --trace $(TRACE) $(if $(QUICK),--quick)

images: ## build the four images, evolving-<service>:dev
	@$(foreach service,$(SERVICES),docker build -f services/$(service)/Dockerfile -t evolving-$(subst _,-,$(service)):dev . &&) true

gen: .venv-gen/.ready ## write the stubs anew
	@protos/gen.sh

proto-baseline: .venv-gen/.ready ## take the present public API as the one not to break
	@.venv-gen/bin/buf build protos -o protos/baseline.binpb

pin: .venv/.ready ## write what is installed to constraints.txt
	@{ head -1 constraints.txt; $(BIN)/pip freeze --exclude-editable | sed 's/+cpu$$//'; } > build/constraints.txt && mv build/constraints.txt constraints.txt

clean: ## stop the cluster and remove what was built (not .venv)
	@test ! -x $(BIN)/python || $(BIN)/python deploy/local/control.py down
	rm -rf build
