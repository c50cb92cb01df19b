# make setup   the environment in .venv, with everything that training, export and the tests need
# make test    every check: style, then types and tests side by side
# make test-all  the tests that `make test` skips: of Ray, onnxruntime 1.17, OpenVINO, CTranslate2, optimum,
#              PEFT, S3, Google Cloud Storage, Node, Chromium and C++, which it installs; 13 minutes
# make fuzz    the tests of tests/fuzz with EXAMPLES=2500 each: malformed files, options, signals
# make demo    trains a tiny model on the built-in corpus, exports, verifies and runs it
# make docs    writes the generated tables of docs/ and js/, and builds the site into build/site
# make sessions  runs the console blocks of docs/, writes what they print, and takes
#              pictures of reports with Chromium; 6 minutes on a quiet machine
# make kernels  builds the package of kernels/ with the C++ compiler and installs it into .venv
# make js      installs onnxruntime and bundlers below js/ and runs the tests there
# make clean   removes what the build, the checks and the demo left; .venv stays
#
# PYTHON names the interpreter for .venv, PIP_FLAGS goes to pip. On a Linux machine without a GPU,
# PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu" saves gigabytes of CUDA.

PYTHON ?= python3
PIP_FLAGS ?=
DEMO ?= build/demo

BIN := .venv/bin
READY := .venv/.ready
PACKAGES := js/node_modules/.ready

# Where the environment forbids Python to keep compiled modules, each command would compile torch
# anew: 7 seconds of importing in place of 2.
export PYTHONDONTWRITEBYTECODE =

# `tests` and `kernels` are folders too.
.PHONY: setup test types tests test-all lowest chromium fuzz demo docs sessions kernels js clean
.DELETE_ON_ERROR:

setup: $(READY)

# --no-compile: of 15,000 modules most are never imported, and compiling takes half a minute.
$(READY): pyproject.toml
	@command -v "$(PYTHON)" >/dev/null || { echo "transferry needs Python 3.11 or later, found no $(PYTHON): install it, or name one with: make $(or $(MAKECMDGOALS),setup) PYTHON=/path/to/python" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "transferry needs Python 3.11 or later, $(PYTHON) is $$("$(PYTHON)" --version 2>&1): name another with: make $(or $(MAKECMDGOALS),setup) PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make environments: sudo apt install python$$("$(PYTHON)" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv" >&2; exit 1; }
	test -x $(BIN)/python || "$(PYTHON)" -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile $(PIP_FLAGS) --editable ".[export,dev]"
	mkdir -p .typing && ln -sfn .. .typing/transferry
	touch $@

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory --jobs 2 types tests

types: setup
	$(BIN)/mypy

# With --dist loadfile, pytest-xdist waits for ever for the tests of a worker that has ended.
tests: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist loadfile --max-worker-restart 0

# Environments on top of .venv, which stays as it is: they hold only what it lacks or has in another
# version. optimum has one of its own, since it holds transformers below 4.58.
.venv-%/.ready: pyproject.toml $(READY)
	$(BIN)/python -m venv .venv-$*
	.venv-$*/bin/python -c 'import pathlib, site, sys; pathlib.Path(site.getsitepackages()[0], "base.pth").write_text("import site; site.addsitedir(" + repr(sys.argv[1]) + ")\n")' "$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')"
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $(PIP_FLAGS) --editable ".[test-$*]"
	touch $@

.venv-oldest/.ready:
	"$(PYTHON)" -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check "onnxruntime==1.17.3" "numpy<2"
	touch $@

# Tests of packages whose versions decide something.
LOWEST := tests/runtime tests/cli tests/export/test_bundle.py tests/export/blame tests/export/report

lowest: .venv-lowest/.ready
	.venv-lowest/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $$($(BIN)/python .ci/lowest.py)
	OMP_NUM_THREADS=1 .venv-lowest/bin/python -m pytest -n auto --dist loadfile $(LOWEST)

# The headers of onnxruntime, 85 kB of Debian 13, into build/: nothing is installed.
HEADERS := build/headers
APT := -o Dir::Etc::SourceList=$(CURDIR)/$(HEADERS)/sources.list -o Dir::Etc::SourceParts=- -o Dir::State::Lists=$(CURDIR)/$(HEADERS)/lists -o Dir::Cache=$(CURDIR)/$(HEADERS)

$(HEADERS)/usr:
	mkdir -p $(HEADERS)/lists/partial $(HEADERS)/archives/partial
	echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian trixie main" > $(HEADERS)/sources.list
	apt-get $(APT) update && cd $(HEADERS) && apt-get $(APT) download libonnxruntime-dev
	dpkg-deb --extract $(HEADERS)/libonnxruntime-dev_*.deb $(HEADERS)

INSTALL_KERNELS := -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) ./kernels

chromium:
	@command -v chromium chromium-browser google-chrome >/dev/null || { echo "Installing Chromium, which opens the pages of reports and of transferry page" && apt-get install --yes --no-install-recommends chromium; } || { echo "No Chromium, and apt-get cannot install it: put chromium on the PATH" >&2; exit 1; }

OPTIONAL_TESTS = PATH="$(CURDIR)/.venv-all/bin:$$PATH" OPTIONAL=required OMP_NUM_THREADS=1

# Tests that draw one configuration of each type in `make test`.
DRAWN := $(patsubst %,tests/build_model/importing/%.py,$(addprefix huggingface/test_,model_types classifiers readers) toolkits/test_sentence_transformers)

test-all: .venv-all/.ready .venv-optimum/.ready .venv-oldest/.ready $(PACKAGES) $(HEADERS)/usr chromium
	.venv-all/bin/python $(INSTALL_KERNELS)
	$(OPTIONAL_TESTS) .venv-all/bin/python -m pytest tests/kernels
	$(OPTIONAL_TESTS) .venv-all/bin/python -m pytest -n auto --dist loadfile --max-worker-restart 0 -m "(optional or thorough) and not optimum" $$(grep -rlE --include='*.py' 'mark\.(optional|thorough)' tests)
	$(OPTIONAL_TESTS) EXAMPLES=2 .venv-all/bin/python -m pytest -n auto --dist loadfile $(DRAWN)
	$(OPTIONAL_TESTS) .venv-all/bin/python -m pytest tests/export/test_conformance.py tests/export/test_recurrent.py -k 'cuda-fp16-recurrent or says_what'
	$(OPTIONAL_TESTS) .venv-optimum/bin/python -m pytest -m optimum tests/export/subject/test_optimum.py
	$(MAKE) --no-print-directory lowest

fuzz: setup
	FUZZ=long OMP_NUM_THREADS=1 $(BIN)/pytest -n auto tests/fuzz

demo: setup
	rm -rf $(DEMO)/run $(DEMO)/bundle $(DEMO)/answers.jsonl
	$(BIN)/transferry train --builtin --preset tiny --out $(DEMO)/run --max-minutes 2
	$(BIN)/transferry export $(DEMO)/run --out $(DEMO)/bundle
	$(BIN)/transferry verify $(DEMO)/bundle --checkpoint $(DEMO)/run --text $(DEMO)/run/corpus/test.en
	$(BIN)/transferry run $(DEMO)/bundle $(DEMO)/run/corpus/test.en -o $(DEMO)/answers.jsonl --beam 4
	head -5 $(DEMO)/answers.jsonl

kernels: setup
	$(BIN)/python $(INSTALL_KERNELS)

js: $(PACKAGES)
	cd js && npm test

# Without install scripts: that of onnxruntime-node fetches CUDA. Into an empty folder: a second
# `npm install --no-save` of a peer dependency removes it.
$(PACKAGES): js/package.json
	rm -rf js/node_modules
	cd js && npm install --no-save --no-package-lock --ignore-scripts onnxruntime-node onnxruntime-web sentencex-wasm @huggingface/jinja esbuild typescript vite webpack
	touch $@

docs: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) --editable ".[docs]"
	$(BIN)/python docs/make_cli_page.py
	$(BIN)/python docs/make_tables.py
	$(BIN)/python docs/make_js_schema.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "build/site/index.html"

sessions: setup
	$(BIN)/python docs/make_sessions.py

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
