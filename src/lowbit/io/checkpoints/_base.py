"""What the readers of quantized checkpoints share: a declaration of each method, and a weight as it is stored."""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lowbit.formats import Array8B, PackedArray, PermutedArray, QuantizedArray
from lowbit.formats.blocks import WHOLE, span_of, stored_length, trimmed
from lowbit.formats.packed import layout_of

from .._checks import bad_tensor, short
from .._dtypes import DTYPES
from ._bits import packed, reversed_bytes

_CHUNK = 1 << 20  # codes that are unpacked at a time
FLOATS = (DTYPES["F32"], DTYPES["F16"], DTYPES["BF16"])
WORDS = (DTYPES["I32"], DTYPES["U32"])
BYTES = (DTYPES["U8"],)
FLOAT8 = (DTYPES["F8_E4M3"],)
POWERS = DTYPES["F8_E8M0"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the files beside the weights say about how these are quantized.

    - `method`: the name of the method in lower case; empty if nothing says that the weights are quantized.
    - `options`: its options. `dtype`: of the model before it was quantized, if it is stated.
    - `metadata`: that of the safetensors files.
    """

    path: Path
    method: str = ""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dtype: np.dtype | None = None
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def option(self, key: str, allowed: Collection[Any], default: Any = None) -> Any:
        """An option, or an error that names it if its value is not allowed."""
        value = self.options.get(key, default)
        # 4.0 and True are equal to integers, and are not meant as such.
        if not any(type(value) is type(other) and value == other for other in allowed):
            raise self.bad(f"{key} {short(value)}, and only {', '.join(map(repr, allowed))} can be read")
        return value

    def bad(self, problem: str) -> ValueError:
        return ValueError(f"{self.path} is quantized by {self.method or 'an unknown method'} with {problem}.")


@dataclasses.dataclass(frozen=True)
class Tensors:
    """The stored tensors of one weight by their roles, as views of the file."""

    path: Path
    name: str
    views: Mapping[str, np.ndarray]

    def bad(self, problem: str) -> ValueError:
        return bad_tensor(self.path, self.name, problem)

    def __contains__(self, role: str) -> bool:
        return role in self.views

    def get(self, role: str, dtypes: Sequence[np.dtype], shape: Sequence[int | None]) -> np.ndarray:
        """A tensor, or an error if its dtype or shape is not as expected; None is any length."""
        view = self.views[role]
        if view.dtype not in dtypes:
            raise self.bad(f"has {role} of {view.dtype}, not {' or '.join(d.name for d in dtypes)}")
        if view.ndim != len(shape) or any(n not in (None, m) for n, m in zip(shape, view.shape, strict=True)):
            wanted = ", ".join("any" if n is None else str(n) for n in shape)
            raise self.bad(f"has {role} of shape {view.shape}, not ({wanted})")
        return view


@dataclasses.dataclass(frozen=True)
class Found:
    """A weight of a checkpoint: its name, its stored tensors by role, and how they are read."""

    name: str
    stored: Mapping[str, str]
    read: Callable[[Tensors], Any]


@dataclasses.dataclass(frozen=True)
class Method:
    """A method of quantizing checkpoints.

    - `names`: the names that configs have for it. `title`: that of the documentation.
    - `find`: the weights among the names of tensors.
    - `mark`: endings of names that only quantized weights of this method have.
    - `needs_config`: the tensors alone do not say what they mean.
    """

    title: str
    names: tuple[str, ...]
    find: Callable[[Mapping[str, Any], Settings], Iterator[Found]]
    mark: str
    needs_config: bool = True


def grouped(
    names: Mapping[str, Any],
    mark: str,
    roles: Mapping[str, str],
    *,
    path: Path,
    optional: Collection[str] = (),
    suffix: str = ".weight",
) -> Iterator[tuple[str, dict[str, str]]]:
    """For each name that ends in `mark`, the name of its weight, and its tensors: an ending for each role."""
    for name in names:
        if not name.endswith(mark):
            continue
        base = name.removesuffix(mark)
        stored = {role: base + ending for role, ending in roles.items() if base + ending in names}
        if missing := [base + roles[role] for role in roles if role not in stored and role not in optional]:
            raise bad_tensor(path, base + suffix, f"lacks {', '.join(map(repr, missing))}")
        yield base + suffix, stored


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight of a checkpoint, whose codes can be unpacked a few rows at a time.

    - `format`: the name of its layout in lowbit. `stored_shape`, `spans`: as of a `QuantizedArray`.
    - `codes`: the code components of rows from `start` to `stop` of the first stored axis.
    - `scales`: the other components, small or views of the file.
    - `order`: the order in which the elements along the last axis of the array are stored (`PermutedArray`).
    - `direct`: codes are views of the file.
    """

    format: str
    stored_shape: tuple[int, ...]
    spans: tuple[int, ...]
    dtype: np.dtype
    codes: Callable[[int, int], dict[str, np.ndarray]]
    scales: Mapping[str, np.ndarray]
    affine: bool = False
    transposed: bool = False
    order: np.ndarray | None = None
    direct: bool = False

    problem: ClassVar[str] = ""  # every weight has a lowbit array with its bits

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, a, b = self.stored_shape
        return (*lead, b, a) if self.transposed else self.stored_shape

    @property
    def unit(self) -> int:
        """The multiple of rows at which scales can be split; `WHOLE` if they cannot be."""
        return span_of(self.spans, -len(self.stored_shape))

    def rows(self, start: int, stop: int) -> QuantizedArray:
        """Rows `start` to `stop` of the first stored axis; `start` is a multiple of `unit`, or scales are shared."""
        span = self.unit
        cut = slice(None) if span == WHOLE else slice(start // span, stored_length(stop, span))
        scales = {name: x[cut] if x.shape[0] > 1 else x for name, x in self.scales.items()}
        return self.built((stop - start, *self.stored_shape[1:]), {**self.codes(start, stop), **scales})

    def built(self, shape: Sequence[int], components: Mapping[str, Any]) -> QuantizedArray:
        common: dict[str, Any] = {"dtype": self.dtype, "spans": self.spans, "transposed": self.transposed, **components}
        if self.format == "int8":
            return Array8B.build(shape=shape, **common)
        return PackedArray.build(shape=shape, format_name=self.format, affine=self.affine, **common)

    def steps(self) -> list[tuple[int, int]]:
        """The rows in runs of about a million codes."""
        rows, width = self.stored_shape[0], max(int(np.prod(self.stored_shape[1:])), 1)
        unit = 1 if self.unit == WHOLE else self.unit
        step = max(_CHUNK // width // unit, 1) * unit
        return [(i, min(i + step, rows)) for i in range(0, rows, step)]

    def like(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """The shape and dtype of each code component."""
        packing = {"codes": 1} if self.format == "int8" else layout_of(self.format).packing
        dtype = np.dtype(np.int8 if self.format == "int8" else np.uint8)
        *lead, width = self.stored_shape
        return {name: ((*lead, -(-width // per_byte)), dtype) for name, per_byte in packing.items()}

    def stored(self) -> QuantizedArray:
        """All rows, in their stored order, with every stored bit."""
        steps = self.steps()
        if self.direct or len(steps) <= 1:
            return self.rows(0, self.stored_shape[0])
        found = {name: np.empty(*like) for name, like in self.like().items()}
        for start, stop in steps:
            for name, component in self.codes(start, stop).items():
                found[name][start:stop] = component
        return self.built(self.stored_shape, {**found, **self.scales})

    def array(self) -> QuantizedArray | PermutedArray:
        """The array with every stored bit."""
        stored = self.stored()
        return stored if self.order is None else PermutedArray(stored, self.order, axis=-1)

    @property
    def row_axis(self) -> int:
        """The axis of the array that is the first stored one."""
        return 1 if self.transposed and len(self.stored_shape) == 2 else 0

    @property
    def rows_are_ordered(self) -> bool:
        """Whether `order` is one of rows, and not within them."""
        return self.order is not None and self.row_axis == 1

    def values(self, start: int, stop: int) -> np.ndarray:
        """The float32 values of rows `start` to `stop`, in the axis order of the array."""
        values = np.asarray(self.rows(start, stop).replace(dtype=np.dtype(np.float32)).materialize())
        if self.order is None or self.rows_are_ordered:
            return values
        found = np.empty_like(values)
        found[..., self.order] = values
        return found

    def dense(self, dtype: Any) -> np.ndarray:
        """Dequantize in float32 and round once."""
        out = np.empty(self.shape, dtype)
        rows, row_order = np.moveaxis(out, self.row_axis, 0), self.order if self.rows_are_ordered else None
        for start, stop in self.steps():
            values = np.moveaxis(self.values(start, stop), self.row_axis, 0)
            with np.errstate(all="ignore"):  # values beyond the range of the dtype become infinite
                rows[slice(start, stop) if row_order is None else row_order[start:stop]] = values
        return out


def dtype_of(scales: np.ndarray, settings: Settings) -> np.dtype:
    """The dtype that a weight reads as: that of its scales if it is narrow, else that of the model."""
    return scales.dtype if scales.dtype in FLOATS[1:] else settings.dtype or np.dtype(np.float32)


def group_spans(tensors: Tensors, length: int, groups: int, *given: Any) -> int:
    """The span of scales along an axis of `length` that has this many of them; `given` are sizes in the config."""
    if groups == 1:
        return WHOLE
    for size in (*given, length // groups if groups else 0):
        if type(size) is int and size > 0 and -(-length // size) == groups:
            return size
    sizes = " or ".join(map(short, given))
    raise tensors.bad(f"has {groups} groups along {length} elements, and the config has groups of {sizes}")


def order_of(tensors: Tensors, role: str, length: int, groups: int, span: int) -> np.ndarray | None:
    """The inputs sorted by their group, which a tensor has for each; None if they are sorted."""
    if role not in tensors:
        return None
    group = tensors.get(role, (*WORDS, np.dtype(np.int64)), (length,)).astype(np.int64)
    group = np.where(group < 0, group + groups, group)
    if length and not (group.min() >= 0 and group.max() < groups):
        raise tensors.bad(f"has a {role} from {group.min()} to {group.max()}, and {groups} groups")
    order = np.argsort(group, kind="stable").astype(np.int32)
    if span != WHOLE and not np.array_equal(group[order], np.arange(length) // span):
        raise tensors.bad(f"has a {role} whose groups are not of {span} inputs each")
    return None if np.array_equal(order, np.arange(length)) else order


def scale_spans(
    tensors: Tensors,
    scales: np.ndarray,
    shape: Sequence[int],
    *,
    groups: Sequence[Any] = (),
    blocks: Sequence[Any] = (),
) -> tuple[np.ndarray, tuple[int, int]]:
    """The scales of a weight with a scale for each axis, and their spans: one for the tensor, channels, groups, blocks.

    - `groups`, `blocks`: sizes that the config has, for this weight or others.
    """
    *lead, rows, length = shape
    if scales.size == 1 and not lead:
        return scales.reshape(1, 1), (WHOLE, WHOLE)
    if scales.shape == (*lead, rows):
        scales = scales[..., None]
    if list(scales.shape[:-2]) != lead or scales.ndim < 2 or not scales.size:
        raise tensors.bad(f"has scales of shape {scales.shape} for a weight of shape {tuple(shape)}")
    for block in blocks:
        if type(block) is list and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
            if scales.shape[-2:] == tuple(-(-n // size) for n, size in zip((rows, length), block, strict=True)):
                return scales, (block[0], block[1])
    if scales.shape[-2] != rows:
        sizes = f", and blocks of {' or '.join(map(short, blocks))}" if blocks else ""
        raise tensors.bad(f"has scales of shape {scales.shape} for a weight of shape {tuple(shape)}{sizes}")
    return scales, (1, group_spans(tensors, length, scales.shape[-1], *groups))


def wide_scales(scales: np.ndarray) -> np.ndarray:
    """Scales that are powers of two, stored as exponents, in float32; others as they are."""
    return scales.view(POWERS).astype(np.float32) if scales.dtype in (*BYTES, POWERS) else scales


def bytes_of(name: str, codes: np.ndarray, scales: np.ndarray, spans: Sequence[int], dtype: np.dtype) -> Weight:
    """A weight with a byte for each code, which are those of a lowbit format: a view of the file."""
    return Weight(
        name,
        codes.shape,
        trimmed(spans),
        dtype,
        lambda start, stop: {"codes": codes[start:stop]},
        {"scales": scales},
        direct=True,
    )


def nibbles(
    name: str,
    stored: np.ndarray,
    scales: np.ndarray,
    dtype: np.dtype,
    block: int,
    group_scales: np.ndarray | None = None,
    **fields: Any,
) -> Weight:
    """A weight of E2M1 codes, two in a byte, the first in the low nibble, with blocks along the last axis."""
    others = {"scales": scales} | ({} if group_scales is None else {"group_scales": group_scales})
    return Weight(
        name,
        (*stored.shape[:-1], 2 * stored.shape[-1]),
        (1, block),
        dtype,
        lambda start, stop: {"codes": reversed_bytes(stored[start:stop], 4)},
        others,
        **fields,
    )


def integers(
    *,
    bits: int,
    shape: Sequence[int],
    spans: Sequence[int],
    dtype: np.dtype,
    codes: Callable[[int, int], np.ndarray],
    scales: np.ndarray,
    zeros: np.ndarray | None = None,
    offsets: np.ndarray | None = None,
    ready: bool = False,
    **fields: Any,
) -> Weight:
    """A weight of unsigned integers: `(code - zero) * scale` or `code * scale + offset`.

    - `codes`: the codes of rows, one in each byte; with `ready` packed as a lowbit array stores them.
    - `zeros`: zero points; None for 2 ** (bits - 1).
    """
    middle = 2 ** (bits - 1)
    if zeros is not None and (zeros == middle).all():
        zeros = None
    affine = zeros is not None or offsets is not None
    name = f"int{bits}" if bits < 8 or not affine else "uint8"
    packing = {} if name == "int8" else layout_of(name).packing

    def components(start: int, stop: int) -> dict[str, Any]:
        found = codes(start, stop)
        if name == "int8":
            return {"codes": (found ^ np.uint8(128)).view(np.int8)}
        return {"codes": found} if ready else packed(found, packing)

    others = {"scales": scales, "offsets": zeros if offsets is None else offsets}
    return Weight(
        name,
        tuple(shape),
        trimmed(spans),
        dtype,
        components,
        {key: value for key, value in others.items() if value is not None},
        affine,
        **fields,
    )
