"""Which tests belong to which tier: every other module of tests asks this one.

`make test` runs the first tier: every feature, every format and every rule once. The rest carry the mark `more`, and
`make test-more` runs them: all layouts and all pairs. A test without a mark belongs to the first tier.

Rules and operations know no format by name (a test checks that). What they do depends on how the array is stored: how
codes are packed and in how many components, which axis has blocks, and whether scales are codes, have group scales or
come with offsets. The tables below are chosen by that.
"""

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from helpers import AFFINE, Layout, layouts, more_layouts

from lowbit import FORMATS

MORE = pytest.mark.more

# One format for each mechanism: codes of 8, 4, 2 and 1 bits, tables, scale codes with group scales along an axis (q4)
# or over a matrix (nvfp4), codes in two components (q3), small floats (fp8). The other rows of the table of formats
# differ from these in numbers alone. The first tier has every one of them where a test is about the numbers.
MECHANISMS = ("int8", "nf4", "ternary", "binary", "q4", "q3", "fp8", "nvfp4")

# For tests over layouts: each mechanism in one layout. Packed axes and axes with blocks meet (axis -1 in blocks of 16)
# and cross (axis -2), and the last row has offsets and 16-bit scales.
FIRST = (
    Layout("int8", -2, None),
    Layout("nf4", -1, 16),
    Layout("ternary", -2, None),
    Layout("binary", -1, 16),
    Layout("q4", -1, 16),
    Layout("q3", -2, None),
    Layout("fp8", -1, 16),
    Layout("nvfp4", -2, None),
    Layout("int4", -2, None, AFFINE),
)

# For tests over layouts and one more list, such as the moves of structural rules: bytes with a scale for each column;
# nibbles with blocks along the packed axis; two components of codes with scale codes and group scales; offsets.
KINDS = (Layout("int8", -2, None), Layout("nf4", -1, 16), Layout("q3", -2, None), Layout("int4", -2, None, AFFINE))

# The same for tests that depend on the axis and the length of the blocks: also blocks along the axis that is not
# packed, and one scale for each row.
FIRST_OF_ANY = (*FIRST, Layout("nf4", -2, 32), Layout("int8", -1, None), Layout("int4", -1, None, AFFINE))
KINDS_OF_ANY = (*KINDS, Layout("nf4", -2, 32), Layout("int8", -1, None))

# Features whose program alone matters: codes in two components and coded scales enter and leave every inner program.
ONE = Layout("q3", -2, None)
# Features that every format runs in the first tier, in the layout of its first row.
OF_EVERY_FORMAT = ("matmul_left", "embedding", "scan_over_layers", "grad_of_activations")


def tiered(rows: Iterable[Any], first: Collection[Any]) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: rows that are not in `first` are marked `more`."""
    every, chosen = ([row if isinstance(row, tuple) else (row,) for row in some] for some in (rows, first))
    assert all(row in every for row in chosen), f"no such rows: {[row for row in chosen if row not in every]}"
    return [pytest.param(*row, marks=() if row in chosen else MORE) for row in every]


# How many random programs a test runs; they are the same in every run.
EXAMPLES = tiered((10, 100), (10,))


def formats(*more: str) -> list[Any]:
    """Every format by name; the first tier has each mechanism, and the formats named here."""
    return tiered(FORMATS, (*MECHANISMS, *more))


def features(names: Iterable[str], layout_matters: Collection[str]) -> list[Any]:
    """Every feature in every layout, and features that depend on the layout in more layouts."""
    rows = [(name, layout) for name in names for layout in layouts()]
    rows += [(name, layout) for name in layout_matters for layout in more_layouts()]
    first = {(name, layout) for name in layout_matters for layout in KINDS_OF_ANY}
    first |= {(name, ONE) for name in names}
    first |= {(name, Layout(format, -2, None)) for name in OF_EVERY_FORMAT for format in FORMATS}
    return [pytest.param(*row, id=f"{row[0]}-{row[1]}", marks=() if row in first else MORE) for row in rows]


def parametrize_layouts(metafunc: pytest.Metafunc) -> None:
    """Run tests with an argument `layout` or `any_layout` in every layout."""
    crossed = any(metafunc.definition.iter_markers("parametrize"))
    for argument, rows, few, pairs in (
        ("layout", layouts(), FIRST, KINDS),
        ("any_layout", layouts() + more_layouts(), FIRST_OF_ANY, KINDS_OF_ANY),
    ):
        if argument in metafunc.fixturenames:
            metafunc.parametrize(argument, tiered(rows, pairs if crossed else few), ids=str)
