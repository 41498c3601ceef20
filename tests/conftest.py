import os

import pytest
from helpers import layouts, more_layouts

import lowbit
from lowbit.runtime import _interpret

# Sharding is tested on eight devices that are none; programs that run once are not worth optimizing.
flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags} --xla_llvm_disable_expensive_passes=true"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "layout" in metafunc.fixturenames:
        metafunc.parametrize("layout", layouts(), ids=str)
    if "any_layout" in metafunc.fixturenames:
        metafunc.parametrize("any_layout", layouts() + more_layouts(), ids=str)


@pytest.fixture(autouse=True)
def fresh_policy():
    """Every test starts with the default policy, and with nothing warned of."""
    _interpret._warned.clear()
    yield
    lowbit.materialization("warn")
