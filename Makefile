# One door for each thing that a developer does; CI goes through the same ones.
# VENV=FOLDER uses that environment; else ./primus-cli makes the project's own, with the developers' tools.
# JOBS=NUMBER is how many processes run the tests: two more than there are cores, since many tests wait for a process.
# RIVALS=PYTHON is an interpreter with the engines that `make bench` compares with (see benchmarks/train_speed.py).

VENV ?=
JOBS ?= $(shell echo $$(($$(nproc) + 2)))
in_parallel = -n $(JOBS) --dist loadfile --no-loadscope-reorder
in_venv = venv="$(or $(VENV),$$(./primus-cli setup --dev))" && PATH="$$venv/bin:$$PATH" &&

.DEFAULT_GOAL := help
.PHONY: help setup engines test-newer-python test retest test-cluster quick core lint format golden docs site mutants bench

help:  ## list these
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-18s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup:  ## make the development environment, or bring it up to date
	@$(in_venv) echo "$$venv"

engines:  ## install the engines that tests use, each in its environment
	@$(in_venv) primus-cli setup --engine all

test-newer-python:  ## the Megatron backend's tests on Python 3.12 or 3.13, for which other versions are published
	@sh tests/newer_python.sh

test: lint  ## every check: the import directions, ruff, mypy, and all tests
	@$(in_venv) python -m pytest $(in_parallel)

retest: lint  ## the tests that failed last, once more
	@$(in_venv) python -m pytest --last-failed --last-failed-no-failures none

test-cluster:  ## install Slurm, containers, sshd and Kubernetes (Debian, root), and run the tests that need them
	@sh tests/cluster/install.sh slurm docker podman apptainer sshd kubernetes
	@$(in_venv) python -m pytest -m cluster

quick:  ## the tests that take less than about ten seconds each
	@$(in_venv) python -m pytest $(in_parallel) -m "not slow"

core:  ## the control plane's tests, without torch, on each Python from 3.10 to 3.13 that is found
	@sh tests/every_python.sh

lint:  ## the import directions, ruff and mypy
	@$(in_venv) lint-imports --no-logo
	@$(in_venv) ruff check
	@$(in_venv) ruff format --check
	@$(in_venv) mypy

format:  ## put the code into the form that lint asks for
	@$(in_venv) ruff check --fix && ruff format

golden:  ## renew the golden files; then read what changed with git diff
	@$(in_venv) python -m pytest --renew-golden -q

docs:  ## write the pages that are made from the package itself
	@$(in_venv) python docs/generate.py

site:  ## build the pages of docs/ as a site with a search, in build/site; needs Python 3.11 and no network
	@$(in_venv) python docs/build_site.py

mutants:  ## plant faults in modules, and see which ones no test notices: ARGS="src/primus/registry.py --number 20"
	@$(in_venv) python tools/mutants.py $(ARGS)

gpu:  ## all that needs a GPU, in parts of at most 9 minutes, results as files: DEVICE=cpu takes tiny shapes
	@$(in_venv) python benchmarks/device_day.py --device $(or $(DEVICE),cuda) $(if $(ENVIRONMENTS),--environments $(ENVIRONMENTS)) $(ARGS)

bench:  ## measure against peers, and record the results in benchmarks/results
	@$(in_venv) python benchmarks/launch_time.py
	@$(in_venv) python benchmarks/machine_time.py
	@$(in_venv) python benchmarks/placement_time.py
	@$(in_venv) python benchmarks/supervision_time.py
	@$(in_venv) python benchmarks/data_verify.py
	@$(in_venv) python benchmarks/kernel_agreement.py
	@$(in_venv) python benchmarks/profile_cost.py
	@$(in_venv) python benchmarks/data_loader.py
	@$(in_venv) python benchmarks/train_speed.py $(if $(RIVALS),--python $(RIVALS),--engines native,native+compile)
	@$(in_venv) python benchmarks/engines_parity.py
	@$(in_venv) python benchmarks/engine_speed.py $(if $(RIVALS),--python $(RIVALS),--engines native)
