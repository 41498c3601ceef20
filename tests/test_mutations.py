"""The list of faults fits the sources; `make mutations` runs it."""

import shlex

import pytest
from mutations import FAULTS, ROOT, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.file} {fault.before[:30]}")
def test_a_fault_has_one_place_and_names_a_test(fault: Fault) -> None:
    source = (ROOT / "src" / "lowbit" / fault.file).read_text()
    assert source.count(fault.before) == 1 and fault.before != fault.after
    path, option, _ = shlex.split(fault.tests)
    assert (ROOT / path).is_file() and option == "-k"
