import gc
import itertools
import os
import platform
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import pytest
import tiers
from helpers import QUICK_COMPILE

import lowbit
from lowbit.kernels import cpu
from lowbit.runtime import _interpret

# Sharding is tested on eight virtual devices. On one, products are not partitioned and compile faster: `make tests` has
# one for tests without the mark `devices`. Programs run once, so optimizing them does not pay.
DEVICES = int(os.environ.get("LOWBIT_TEST_DEVICES", 8))
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES} {QUICK_COMPILE}"
)
# The workers of a run share the cores: more threads for NumPy's products would spin while they wait.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Programs of their own, which need the compilers of NVIDIA and the command line; and helpers of tests that run on the
# newest JAX only, some of which need packages that the oldest environment lacks.
collect_ignore = ["gpu_aot.py", "kill.py", "cli_helpers.py", "eformer_helpers.py", "families"]


pytest_generate_tests = tiers.parametrize_layouts

# The workers of a run share JAX's compilation cache, since they compile many equal programs. Compiling the smallest
# takes 19 ms, reading it 2 ms. LOWBIT_TEST_COMPILED names a directory that stays. Programs that tests start do without.
COMPILED = "LOWBIT_TEST_COMPILED"
_temporary_cache: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    if COMPILED not in os.environ:  # a worker inherits that of the first process
        _temporary_cache.append(tempfile.mkdtemp(prefix="lowbit-compiled-"))
        os.environ[COMPILED] = _temporary_cache[0]
    jax.config.update("jax_compilation_cache_dir", os.environ[COMPILED])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tiers.thin(items)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # modules and tests stay, so that the collector need not visit them


def pytest_unconfigure(config: pytest.Config) -> None:
    for directory in _temporary_cache:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(autouse=True)
def fresh_policy():
    """Start every test with the default policy, and with no warning given yet."""
    _interpret._warned.clear()
    yield
    lowbit.materialization.set("warn")


# The kernel limits the memory maps of a process, and every compiled program has several: past the limit, the compiler
# aborts. So a long run forgets its programs before that.
MAPS, MOST_MAPS = Path("/proc/self/maps"), 30_000
_tests = itertools.count(1)


@pytest.fixture(autouse=True)
def forget_programs():
    yield
    if next(_tests) % 50 == 0 and MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()


# Fixtures of several modules. Each imports its helpers itself, since not every environment has their packages.


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A llama of two layers in a GGUF file."""
    from test_demo import tiny_file

    return tiny_file(tmp_path / "tiny.gguf")


# The instruction sets of this machine; LOWBIT_TEST_ISA names others, for a library that runs in an emulator.
ARM = platform.machine() in ("aarch64", "arm64")
ISAS = os.environ.get("LOWBIT_TEST_ISA") or ("generic,neon,neon_dot,neon_i8mm" if ARM else "generic,avx2,avx512")


def _isas() -> list[Any]:
    """The best one of this machine in the first tier; all of those that are named."""
    best = cpu.instruction_set()
    named = "LOWBIT_TEST_ISA" in os.environ or best is None
    return tiers.tiered(ISAS.split(","), ISAS.split(",") if named else [best])


@pytest.fixture(scope="session", params=_isas())
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """target(name) is the name in JAX of a target of the library for one instruction set.

    It stands here since a session may register a name only once, and a fixture that two modules import is two fixtures.
    A fixture with parameters is also made again when a module returns to one of them.
    """
    from native_helpers import registered

    if request.param not in _targets:
        _targets[request.param] = registered(request.param, tmp_path_factory.mktemp("native"))
    return _targets[request.param]


_targets: dict[str, Any] = {}


@pytest.fixture
def low_rank() -> Any:
    """An implicit array of shape (6, 5)."""
    import jax.numpy as jnp
    from runtime_helpers import LowRank

    return LowRank(jnp.arange(12.0).reshape(6, 2), jnp.arange(10.0).reshape(2, 5))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A safetensors file to be streamed."""
    import safetensors.numpy
    from stream_helpers import tensors

    path = tmp_path / "in.safetensors"
    safetensors.numpy.save_file(tensors(), path)
    return path


@pytest.fixture
def directory(source: Path, tmp_path: Path) -> Path:
    """The same as a Hugging Face directory."""
    (tmp_path / "hf").mkdir()
    source.rename(tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text("{}")
    return tmp_path / "hf"


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stream in chunks that are smaller than the tensors of `source`."""
    from lowbit.io import _chunks
    from lowbit.io.streaming import _staging

    monkeypatch.setattr(_chunks, "CHUNK", 2048)
    monkeypatch.setattr(_chunks, "STRIPE", 2048)
    monkeypatch.setattr(_staging, "SYNCED", 4096)
