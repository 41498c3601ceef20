import os
import zlib

import pytest
from helpers import HALF, layouts, more_layouts

import lowbit
from lowbit.runtime import _interpret

# Sharding is tested on eight devices that are none; programs that run once are not worth optimizing.
flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags} --xla_llvm_disable_expensive_passes=true"

# Programs of their own: they need the compilers of NVIDIA, and the command line.
collect_ignore = ["gpu_aot.py", "kill.py"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "layout" in metafunc.fixturenames:
        metafunc.parametrize("layout", layouts(), ids=str)
    if "any_layout" in metafunc.fixturenames:
        metafunc.parametrize("any_layout", layouts() + more_layouts(), ids=str)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where time is short, half of the tests that run in every layout, on the oldest JAX a fourth; always the same."""
    if HALF is None:
        return
    left = [
        item
        for item in items
        if {"layout", "any_layout", "six_bits"} & {*getattr(item, "fixturenames", ())}
        and zlib.crc32(item.name.encode()) % (2 if HALF else 4) != HALF
    ]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in {*left}]


@pytest.fixture(autouse=True)
def fresh_policy():
    """Every test starts with the default policy, and with nothing warned of."""
    _interpret._warned.clear()
    yield
    lowbit.materialization.set("warn")
