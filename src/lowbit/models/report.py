"""Reports on quantized models: a row for every leaf, as a table or as an HTML page."""

import dataclasses
import html
import json
import math
from collections.abc import Iterable, Iterator
from importlib.resources import files
from typing import Any, NamedTuple

from lowbit.runtime import is_implicit

from .histogram import Histogram
from .plan import Plan


class Outputs(NamedTuple):
    """What calibration did to a leaf: its output error without and with it, and what was done."""

    before: float | None
    after: float | None
    how: str | None


NOT_CALIBRATED = Outputs(None, None, None)
NO_STATISTIC = Outputs(None, None, "no statistic in the calibration")


def calibrated_by(before: float, after: float, full: bool) -> Outputs:
    """What calibration did, given output errors without and with it. `full`: it had second moments, for GPTQ."""
    how = "GPTQ" if full else "weighted search"
    return Outputs(before, after, how if after < before else f"no gain from {how}, not calibrated")


@dataclasses.dataclass(frozen=True)
class Row:
    """A leaf: how it is stored, or why it was kept.

    - `format`: the name of the format, or None for a leaf that was kept.
    - `axis`: the axis along which elements share a scale.
    - `before`, `after`: sizes in bytes.
    - `error`: relative error |stored - original| / |original|; None for a leaf that was kept, and under a trace.
    - `why`: how the axis was found, or why the leaf was kept.
    - `tied`: the path of an earlier leaf that is the same array; totals count it once.
    - `output_before`, `output_after`: the output error |X (W - Q)|^2 / |X W|^2 on the calibration data, of the format
      without calibration and as stored; None without calibration.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    format: str | None
    axis: int | tuple[int, ...] | None
    before: int
    after: int
    error: float | None
    why: str
    tied: str | None = None
    output_before: float | None = None
    output_after: float | None = None

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Report:
    """A report with a row for every leaf. It prints as a table and renders as HTML in a notebook.

    - `unmatched`: patterns that matched no leaf.
    - `histograms`: of the leaves with the largest errors, shown in the HTML page.
    - `notes`: sentences shown below the table.
    - `on_disk`: the size in bytes of the file that was written, or None.

    >>> import jax.numpy as jnp, lowbit
    >>> _, report = lowbit.quantize_tree({"kernel": jnp.ones((64, 32)), "bias": jnp.ones(32)}, "int8")
    >>> print(report)
    path    shape  format   axis  bits   MB      error     why
    bias    32     float32  -     32.00  0.0001  -         kept: a vector
    kernel  64x32  int8     -2    8.50   0.0022  0.000000  name: (in, out) as in Flax
    total   2,080                 8.86   0.0023            from 0.0083 MB: 3.61 times smaller
    >>> report["kernel"].format, len(report.kept)
    ('int8', 1)
    """

    rows: tuple[Row, ...]
    unmatched: tuple[str, ...] = ()
    histograms: tuple[Histogram, ...] = ()
    notes: tuple[str, ...] = ()
    on_disk: int | None = None

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, path: str) -> Row:
        for row in self.rows:
            if row.path == path:
                return row
        raise KeyError(f"The report has no leaf {path!r}; it has {', '.join(row.path for row in self.rows[:20])}.")

    @property
    def quantized(self) -> tuple[Row, ...]:
        """The leaves that were quantized."""
        return tuple(row for row in self.rows if row.format is not None)

    @property
    def kept(self) -> tuple[Row, ...]:
        """The leaves that were kept as they were."""
        return tuple(row for row in self.rows if row.format is None)

    @property
    def before(self) -> int:
        """Bytes of all leaves before quantization."""
        return sum(row.before for row in self.rows if row.tied is None)

    @property
    def after(self) -> int:
        """Bytes of all leaves after quantization."""
        return sum(row.after for row in self.rows if row.tied is None)

    @property
    def size(self) -> int:
        """The number of elements of all leaves."""
        return sum(row.size for row in self.rows if row.tied is None)

    @property
    def bits(self) -> float:
        """Stored bits per element, over all leaves."""
        return _bits(self.after, self.size)

    @property
    def table(self) -> list[tuple[str, ...]]:
        """The cells of the table: its head, a line for each row, and the total."""
        table: list[tuple[str, ...]] = [("path", "shape", "format", "axis", "bits", "MB", "error", "why")]
        for row in self.rows:
            table.append(
                (
                    row.path or ".",
                    "x".join(map(str, row.shape)) or "scalar",
                    row.format or row.dtype,
                    "-" if row.axis is None else str(row.axis),
                    f"{_bits(row.after, row.size):.2f}",
                    _megabytes(row.after),
                    "-" if row.error is None else f"{row.error:.6f}",
                    (row.why if row.format else f"kept: {row.why}") + (f"; tied to {row.tied}" if row.tied else ""),
                )
            )
        change = f"from {_megabytes(self.before)} MB: {_change(self.before, self.after)}" if self.after else ""
        table.append(("total", f"{self.size:,}", "", "", f"{self.bits:.2f}", _megabytes(self.after), "", change))
        if any(row.output_after is not None for row in self.rows):
            cells = ["output error", *map(_outputs, self.rows), ""]
            table = [(*line[:-1], cell, line[-1]) for line, cell in zip(table, cells, strict=True)]
        return table

    def __str__(self) -> str:
        table = self.table
        widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
        lines = [
            "  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in table
        ]
        return "\n".join([*lines, *self._all_notes()])

    def _all_notes(self) -> list[str]:
        return [*(f"The pattern {pattern!r} matched no leaf." for pattern in self.unmatched), *self.notes]

    def as_dicts(self) -> list[dict[str, Any]]:
        """The rows as plain dicts, for JSON or a data frame."""
        return [dataclasses.asdict(row) for row in self.rows]

    def to_html(self, title: str = "Quantized model") -> str:
        """Render the report as a self-contained HTML page: totals, charts by layer, a table, histograms.

        >>> import jax.numpy as jnp, lowbit
        >>> _, report = lowbit.quantize_tree({"kernel": jnp.ones((64, 32))}, "int8", histograms=8)
        >>> page = report.to_html("A kernel of ones")
        >>> page.startswith("<!doctype html>"), page.count("</script>")
        (True, 2)
        """
        data = {
            "title": title,
            "totals": {"before": self.before, "after": self.after, "size": self.size},
            "rows": [row | {name: _json_number(row[name]) for name in _NUMBERS} for row in self.as_dicts()],
            "histograms": [dataclasses.asdict(found) for found in self.histograms],
            "notes": self._all_notes(),
        }
        # ASCII, with <, > and & escaped, so that no name can end the script element.
        text = json.dumps(data, allow_nan=False, separators=(",", ":"))
        for character in "<>&":
            text = text.replace(character, f"\\u{ord(character):04x}")
        page = files("lowbit.models").joinpath("report.html").read_text("utf-8")
        return page.replace(">DATA<", f">{text}<")

    def _repr_html_(self) -> str:
        # An iframe keeps the styles and names of the page apart from the notebook and from other reports.
        page = html.escape(self.to_html())
        return f'<iframe srcdoc="{page}" sandbox="allow-scripts" style="width:100%;height:42rem;border:0"></iframe>'


def row(path: str, before: Any, after: Any, plan: Plan, error: float | None, outputs: Outputs = NOT_CALIBRATED) -> Row:
    """The row of the report for a leaf, given before and after."""
    sizes = array_bytes(before), array_bytes(after)
    name, axis = (None, None) if plan.config is None else (str(plan.config.dtype), plan.config.axis)
    why = plan.why if outputs.how is None or name is None else f"{plan.why}; {outputs.how}"
    own = Row(path, tuple(before.shape), str(before.dtype), name, axis, sizes[0], sizes[1], error, why)
    return dataclasses.replace(own, output_before=outputs.before, output_after=outputs.after)


def array_bytes(leaf: Any) -> int:
    """The bytes of an array, or of the type of one (`jax.ShapeDtypeStruct`)."""
    return int(leaf.nbytes) if is_implicit(leaf) else math.prod(leaf.shape) * leaf.dtype.itemsize


def relative_error(lost: float, size: float) -> float:
    """The relative error from the sums of `squares`; the absolute one where the weights are all zero."""
    return math.sqrt(lost / size) if size > 0 else math.sqrt(lost)


def worst(rows: Iterable[Row], count: int) -> list[Row]:
    """The `count` leaves with the largest errors, each array once."""
    if count < 0:
        raise ValueError(f"histograms={count} must be the number of leaves to show, 0 or more.")
    known = [(row.error, row) for row in rows if row.format is not None and row.error is not None and row.tied is None]
    known.sort(key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0], reverse=True)
    return [row for _, row in known[:count]]


# Fields of a row that may be NaN.
_NUMBERS = ("error", "output_before", "output_after")


def _outputs(row: Row) -> str:
    """The output error before and after calibration."""
    if row.output_before is None or row.output_after is None:
        return "-"
    return f"{row.output_before:.6f} -> {row.output_after:.6f}"


def _json_number(value: float | None) -> float | str | None:
    """A number for JSON; NaN and infinity as strings that JavaScript's `Number` parses."""
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity"


def _change(before: int, after: int) -> str:
    """The ratio of two positive sizes, in words."""
    if before == after:
        return "the same size"
    ratio = f"{max(before, after) / max(1, min(before, after)):.2f}"
    return "about the same size" if ratio == "1.00" else f"{ratio} times {'smaller' if after < before else 'larger'}"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f}" if count >= 1e7 else f"{count / 1e6:.4f}"


def _bits(stored: int, size: int) -> float:
    return 8 * stored / size if size else 0.0
