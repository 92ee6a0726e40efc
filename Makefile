# Everything sets itself up: each virtual environment is built on first use and rebuilt when pyproject.toml changes.

NEWEST_JAX := 0.12.0.1
OLDEST_JAX := 0.11.2

PYTEST := -m pytest -n 3 --dist worksteal --durations=5
# What JAX needs of CUDA, where there is a GPU.
CUDA := $(if $(shell command -v nvidia-smi),[cuda13])

# pytest rewrites every test module, which takes each worker seconds: what the first run's workers wrote, others read.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check venvs lint type test-new test-old aot aot-new aot-old mutants clean

# Such as `make demo DEMO='--steps 3'`.
demo: .venv-new/ready
	.venv-new/bin/python examples/char_model.py $(DEMO)

test: venvs lint type test-new test-old aot

# For an editor's loop: of every test of the library one case, and what tells of the layout.
check: lint type
	.venv-new/bin/python $(PYTEST) --one-in 100000 -m "not gpu and not slow and not aot" \
	  tests/test_architecture.py tests/test_docs.py tests/jaxsoftmax

venvs:
	$(MAKE) -j4 .venv-new/ready .venv-old/ready .aot-new/ready .aot-old/ready

lint: .venv-new/ready
	.venv-new/bin/ruff check .
	.venv-new/bin/ruff format --check .

type: .venv-new/ready
	.venv-new/bin/pyright

# With the GPU kernels in Mosaic's interpreter, and its race detector.
test-new: .venv-new/ready
	.venv-new/bin/python $(PYTEST) -m "not gpu and not aot" --must-pass=slow

# The oldest JAX runs a sample, for want of time: one in sixteen of each test's cases; no binary, examples, documents,
# scripts, interpreter, planted faults or stand-ins for kernels.
test-old: .venv-old/ready
	.venv-old/bin/python $(PYTEST) --one-in 16 -m "not gpu and not slow and not aot" \
	  -k "not interpret and not stand-in and not mutant" --ignore=tests/benchmarks --ignore=tests/test_examples.py \
	  --ignore=tests/test_architecture.py --ignore=tests/test_docs.py --ignore=tests/test_gpu_scripts.py

# The GPU kernels compiled to machine code for an H200, on a machine without one: by the newest JAX, and of each test's
# cases one in sixteen by the oldest, without tests marked `slow`.
aot: aot-new aot-old

aot-new: .venv-new/ready .aot-new/ready
	JAX_PLATFORMS=cpu PYTHONPATH=.aot-new .venv-new/bin/python $(PYTEST) tests/pallas_kernels -m aot --must-pass=aot,slow

aot-old: .venv-old/ready .aot-old/ready
	JAX_PLATFORMS=cpu PYTHONPATH=.aot-old .venv-old/bin/python $(PYTEST) tests/pallas_kernels -m "aot and not slow" --one-in 16 \
	  --must-pass=aot

# How much the tests notice, which is not part of `make test`: an hour at the most, and goes on where it ended. Such as
# `make mutants MUTANTS='--module sequence --sample 40'`.
mutants: .venv-new/ready .cosmic-ray/ready
	JAX_PLATFORMS=cpu PYTHONPATH=.cosmic-ray .venv-new/bin/python tests/mutation.py $(MUTANTS)
	JAX_PLATFORMS=cpu PYTHONPATH=.:tests .venv-new/bin/python tests/pallas_kernels/mutants.py

.cosmic-ray/ready: .venv-new/ready
	rm -rf $(@D)
	.venv-new/bin/python -m pip install --quiet --target $(@D) cosmic-ray==8.7.0
	touch $@

.venv-new/ready: pyproject.toml .ci/venv
	.ci/venv .venv-new -e '.[test]' 'jax$(CUDA)==$(NEWEST_JAX)'
	touch $@

.venv-old/ready: pyproject.toml .ci/venv
	.ci/venv .venv-old -e '.[test]' jax==$(OLDEST_JAX)
	touch $@

# No dependencies of the plugin: its compiler is linked in, and the CUDA libraries are only needed to run. The other two are
# an assembler and a disassembler, to look at what it makes.
.aot-new/ready: AOT_JAX := $(NEWEST_JAX)
.aot-old/ready: AOT_JAX := $(OLDEST_JAX)
.aot-%/ready: .venv-%/ready
	rm -rf $(@D)
	.venv-$*/bin/python -m pip install --quiet --no-deps --target $(@D) \
	  jax-cuda13-plugin==$(AOT_JAX) jax-cuda13-pjrt==$(AOT_JAX)
	.venv-$*/bin/python -m pip install --quiet --no-deps --target $(@D)/cuda \
	  nvidia-cuda-nvcc==13.5.37 nvidia-cuda-nvdisasm==13.5.37
	touch $@

clean:
	rm -rf .venv-new .venv-old .aot-new .aot-old .cosmic-ray .mutants .pytest_cache .ruff_cache .hypothesis build dist
