"""Which tests belong to which tier: every other module of tests asks this one.

`make test` runs the first tier: every feature, every format and every rule once. The rest carry the mark `more`, and
`make test-more` runs them: all layouts, and of long lists of pairs a systematic choice (`thin`). Other pairs carry the
mark `every` too; `make test-all` runs them. A test without a mark belongs to the first tier.

The first tier runs on one device, except for tests with the mark `devices`, which need several. The other tiers run on
eight virtual devices, where every product is partitioned.

On the oldest JAX, the first tier has every feature and every rule in one layout. Rows that differ from that one in the
format alone meet nothing else of JAX; they carry the mark `newest`, and run there in the third tier.

Rules and operations know no format by name (a test checks that). What they do depends on how the array is stored: how
codes are packed and in how many components, which axis has blocks, and whether scales are codes, have group scales or
come with offsets. The tables below are chosen by that.
"""

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest
from helpers import AFFINE, Layout, layouts, more_layouts

from lowbit import FORMATS

MORE = pytest.mark.more
NEWEST = pytest.mark.newest
EVERY = pytest.mark.every
DEVICES = pytest.mark.devices

# One format for each mechanism: codes of 8, 4, 2 and 1 bits, tables, scale codes with group scales along an axis (q4)
# or over a matrix (nvfp4), codes in two components (q3), small floats (fp8). The other rows of the table of formats
# differ from these in numbers alone. The first tier has every one of them where a test is about the numbers.
MECHANISMS = ("int8", "nf4", "ternary", "binary", "q4", "q3", "fp8", "nvfp4")

# The kinds of storage that rules tell apart: bytes with a scale for each column; nibbles with blocks along the packed
# axis; two components of codes with scale codes and group scales; offsets. Tests over layouts run on these.
KINDS = (Layout("int8", -2, None), Layout("nf4", -1, 16), Layout("q3", -2, None), Layout("int4", -2, None, AFFINE))
KINDS_OF_FORMATS = ("int8", "nf4", "q3", "int4")
# For tests that are crossed with another list or depend on the program alone: codes in two components and coded scales
# enter and leave every inner program.
ONE = Layout("q3", -2, None)
# For tests that depend on the axis and the length of the blocks: also blocks along the axis that is not packed, and one
# scale for each row.
KINDS_OF_ANY = (*KINDS, Layout("nf4", -2, 32), Layout("int8", -1, None))
# For tests of kernels and files, which do know formats: each mechanism, the packed axis and that of the blocks together
# (axis -1 in blocks of 16) and apart (axis -2).
EACH_MECHANISM = (
    *KINDS,
    Layout("ternary", -2, None),
    Layout("binary", -1, 16),
    Layout("q4", -1, 16),
    Layout("fp8", -1, 16),
    Layout("nvfp4", -2, None),
)

# Features that every format runs: products along both axes, and rows that are looked up. Then the layouts of features
# that depend on the layout, and the features that offsets add a product to.
OF_EVERY_FORMAT = ("tied_head", "grad_of_activations")
OF_FEATURES = (ONE, Layout("nf4", -1, 16))
OF_OFFSETS = ("matmul_left", "einsum_heads", "embedding", "scan_over_layers", "concatenated", "slices")


def tiered(rows: Iterable[Any], first: Iterable[Any], on_oldest: Iterable[Any] | None = None) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: rows that are not in `first` are marked `more`.

    Rows of `first` that are not in `on_oldest` are marked `newest`. By default, none are.
    """
    rows = [row if isinstance(row, tuple) else (row,) for row in rows]
    chosen = _texts(first)
    everywhere = chosen if on_oldest is None else _texts(on_oldest)
    unknown = (chosen | everywhere) - {*map(repr, rows)}
    assert not unknown, f"no such rows: {unknown}"
    assert everywhere <= chosen, f"not in the first tier: {everywhere - chosen}"

    def marks(row: tuple[Any, ...]) -> Any:
        return MORE if repr(row) not in chosen else NEWEST if repr(row) not in everywhere else ()

    return [pytest.param(*row, marks=marks(row)) for row in rows]


def _texts(rows: Iterable[Any]) -> set[str]:
    return {repr(row if isinstance(row, tuple) else (row,)) for row in rows}  # a row may have dicts in it


def formats() -> list[Any]:
    """Every format by name; the first tier has one for each kind of storage."""
    return tiered(FORMATS, KINDS_OF_FORMATS)


def mechanisms() -> list[Any]:
    """Every format by name; the first tier has one for each mechanism."""
    return tiered(FORMATS, (*MECHANISMS, "int4"))


def pairs(names: Collection[str], rows: Collection[Layout], first: Collection[Layout]) -> list[Any]:
    """Every name in every layout; the first tier has each name in the layouts `first`."""
    return tiered(itertools.product(names, rows), [*itertools.product(names, first)])


def features(names: Collection[str], layout_matters: Collection[str]) -> list[Any]:
    """Every feature in every layout, and features that depend on the layout in more layouts."""
    rows = [*itertools.product(names, layouts()), *itertools.product(layout_matters, more_layouts())]
    first = [*itertools.product(names, [ONE]), *itertools.product(layout_matters, OF_FEATURES)]
    first += [(name, Layout("int4", -2, None, AFFINE)) for name in OF_OFFSETS]
    first += [(name, Layout(format, -2, None)) for name in OF_EVERY_FORMAT for format in FORMATS]
    return tiered(rows, first, itertools.product(names, [ONE]))


def parametrize_layouts(metafunc: pytest.Metafunc) -> None:
    """Run tests with an argument `layout` or `any_layout` in every layout.

    The first tier has the layouts of the mark `first`. Without it, a test of this argument alone runs on each kind of
    storage, and a test that is crossed with another list in one layout. The oldest JAX has one layout of them.
    """
    mark = metafunc.definition.get_closest_marker("first")
    crossed = any(metafunc.definition.iter_markers("parametrize"))
    for argument, rows, few, one in (
        ("layout", layouts(), KINDS, (ONE,)),
        ("any_layout", layouts() + more_layouts(), KINDS_OF_ANY, KINDS_OF_ANY),
    ):
        if argument in metafunc.fixturenames:
            first = mark.args if mark else one if crossed else few
            on_oldest = [ONE] if ONE in first else first[:1]
            metafunc.parametrize(argument, tiered(rows, first, on_oldest), ids=str)


# A test with more pairs than this in the second tier is thinned out; and how many partners each layout keeps.
MANY_PAIRS, PARTNERS = 60, 4


def thin(items: Sequence[pytest.Item]) -> None:
    """Mark `every` those pairs of a layout and another parameter that the second tier can do without.

    It keeps every row of the other list on every kind of storage, and every layout with up to four rows, which are
    spread evenly over the list and begin one row later for the next layout; with one of a list of up to four.
    """
    functions = defaultdict[str, list[tuple[pytest.Item, Layout, str]]](list)
    for item in items:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        ways = [value for value in params.values() if isinstance(value, Layout)]
        if ways and item.get_closest_marker("more"):
            others = repr([value for value in params.values() if not isinstance(value, Layout)])
            functions[item.nodeid.split("[")[0]].append((item, ways[0], others))
    for pairs in functions.values():
        ways, others = (list(dict.fromkeys(pair[i] for pair in pairs)) for i in (1, 2))
        step = len(others) if len(others) <= PARTNERS else -(-len(others) // PARTNERS)
        for item, way, other in pairs:
            turn = (others.index(other) - ways.index(way)) % step
            if len(pairs) > MANY_PAIRS and way not in KINDS and turn != 0:
                item.add_marker(EVERY)


# How many random programs a test runs; they are the same in every run.
EXAMPLES = tiered((5, 100), (5,))
