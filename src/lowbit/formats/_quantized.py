"""QuantizedArray: what every format fulfils, and the table of formats.

A format is a subclass with its parts, `quantize`, `levels`, and a row in the table. All else is here and in `rules/`.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from lowbit.runtime import ImplicitArray, aux_field
from lowbit.runtime._compat import mesh_in_context

from ._blocks import WHOLE, axis_slice, span_of, spread, stored_length, trimmed, unpack

# A format's parts are final as dataclass fields and given by their documented names, so `__init__` is written once.
stored = dataclasses.dataclass(frozen=True, init=False, eq=False, repr=False)


@stored
class QuantizedArray(ImplicitArray):
    """An array stored as codes and scales: `level(code) * scale`, in float32, read as `dtype`.

    - Every part has the rank and the axis order of the array, with a span for each axis (see `_blocks`).
    - Codes are packed along the last stored axis, `packing[part]` of them in each stored element.
    - `transposed`: the last two axes are stored swapped.
    - `index`: the array is these layers of the first stored axis: `shape == index.shape + (shape of a layer)`.
      Only inside of `implicit`; what leaves it has its layers taken out.
    - `spans` and `lengths` speak of stored axes, counted from the end, so that a leading axis may come and go.
    - `lengths`: of the axes whose last byte or block is not full, for which the parts alone do not tell.
    - The parts are constants: gradients stop at them.
    - `use_kernel`, `compute`: how its products run, unless the settings of these names say otherwise.
    """

    codes: jax.Array
    scales: jax.Array
    index: jax.Array | None
    dtype: np.dtype = aux_field()
    spans: tuple[int, ...] = aux_field()
    lengths: tuple[tuple[int, int], ...] = aux_field()
    transposed: bool = aux_field()
    use_kernel: bool = aux_field()
    compute: str = aux_field()

    # The documented names of the parts, in the order of the constructor.
    part_names: ClassVar[dict[str, str]] = {"weight": "codes", "scale": "scales"}
    # Parts from which `scale_values` decodes, if they are there. They have the axes of the array before the last two.
    scale_parts: ClassVar[tuple[str, ...]] = ()
    # Multiplier that maps levels to int8, rounded unless it is 1; None if they do not fit.
    int8_multiplier: ClassVar[int | None] = None
    # The block sizes that the format may have; None for any.
    block_sizes: ClassVar[tuple[int, ...] | None] = None

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        # A subclass with its own levels or packing cannot use a kernel's decoder for those of its base.
        for name in ("decoder", "int8_multiplier"):
            if min(_defined_at(cls, "levels"), _defined_at(cls, "packing")) < _defined_at(cls, name):
                setattr(cls, name, None)

    # --- what a format says

    @property
    def packing(self) -> dict[str, int]:
        """How many codes one stored element of each code part holds along the last stored axis."""
        return {"codes": 1}

    def levels(self, *codes: jax.Array) -> jax.Array:
        """The float32 values of codes before scaling, element by element; one array of codes for each code part.

        Law: `materialize() == levels(...) * scale`. It must be plain jnp on codes of any shape and integer type, since
        kernels call it on their tiles; of `self` it may use static fields only.
        """
        raise NotImplementedError

    @classmethod
    def quantize(cls, array: Any, *args: Any, **options: Any) -> Self:
        """The nearest array of this format."""
        raise NotImplementedError

    def scale_values(self) -> jax.Array:
        """The scales as float32, where a format stores them otherwise."""
        return self.scales

    @property
    def decoder(self) -> str | None:
        """The name of the format's decode function in the native library, if it has one there.

        A subclass with `levels` or `packing` of its own does not inherit it, nor `int8_multiplier`.
        """
        return None

    def coded_scales(self) -> tuple[Any, Any, Any, Any] | None:
        """Scales that are codes themselves, by group: codes, scale of each group, offset, table of the codes."""
        return None

    def plain(self) -> Self:
        """The same array with its scales stored as they are, ready to be moved about. Not a value changes."""
        if all(getattr(self, name) is None for name in self.scale_parts):
            return self
        return self.replace(scales=self.scale_values(), **dict.fromkeys(self.scale_parts))

    def with_coded_scales(self) -> Self:
        """The same array with its scales stored in `scale_parts`, where a format has them. Reads the scales alone."""
        raise NotImplementedError

    # --- making one

    def __init__(self, *parts: Any, **given: Any):
        names = list(self.part_names)
        if len(parts) > len(names):
            raise TypeError(
                f"{type(self).__name__} takes one array to quantize, or its parts {', '.join(names)}, "
                f"and got {len(parts)} positional arguments."
            )
        if len(parts) == 1 and not any(name in given for name in names):
            array = type(self).quantize(parts[0], **given)
        else:
            array = self.from_parts(**dict(zip(names, parts, strict=False)), **given)
        self.__dict__.update(array.__dict__)

    @classmethod
    def build(cls, *, shape: Sequence[int], dtype: Any, spans: Sequence[int], **fields: Any) -> Self:
        """An array of stored `shape` from its fields, by their own names."""
        new = object.__new__(cls)
        defaults = {"index": None, "transposed": False, "lengths": (), "use_kernel": True, "compute": "exact"}
        new.__dict__.update(defaults, dtype=np.dtype(dtype), **fields)
        new = new.reshaped(shape, spans)
        where = None if isinstance(new.codes, Tracer) else getattr(new.codes, "sharding", None)
        if isinstance(where, NamedSharding) and not where.is_fully_replicated:
            check_pieces(new.stored_shape, where.spec, where.mesh, new._elements)
        return new

    def reshaped(self, shape: Sequence[int], spans: Sequence[int], **changes: Any) -> Self:
        """The array with other parts, of another stored shape."""
        new = self.replace(spans=trimmed(spans), **changes)
        covers = new.part_spans().values()
        lengths = (
            (axis, shape[axis])
            for axis in range(-len(shape), 0)
            if any((span := span_of(spans, axis)) > 1 and shape[axis] % span for spans in covers)
        )
        return new.replace(lengths=tuple(lengths))

    @classmethod
    def from_parts(
        cls,
        *,
        shape: Sequence[int] | None = None,
        dtype: Any = np.float32,
        axis: Any = None,
        block_size: int | None = None,
        **parts: Any,
    ) -> Self:
        """Build an array from its components by their documented names.

        Pass `shape` if the last byte of a row is not full, and `block_size` if more than one would give this number of
        scales, for instance if the last block may be short. Raises a `ValueError` if the block size is ambiguous.
        """
        own = {n for c, b in zip(cls._fields(), QuantizedArray._fields(), strict=True) for n in c if n not in b}
        missing = [name for name in cls.part_names if name not in parts]
        unknown = [name for name in parts if name not in {*cls.part_names, *own}]
        if missing or unknown:
            raise TypeError(
                f"{cls.__name__} is made of {', '.join((*cls.part_names, *sorted(own)))}: "
                f"missing {missing or 'none'}, not known {unknown or 'none'}."
            )
        defaults = {name: getattr(cls, name) for name in own if hasattr(cls, name)}
        parts = {**dict.fromkeys(cls.scale_parts), **defaults, **parts}
        fields = {field: jnp.asarray(parts.pop(name)) for name, field in cls.part_names.items()}
        codes, scales = fields["codes"], fields["scales"]
        new = cls.build(shape=(), dtype=dtype, spans=(), **fields, **parts)
        spare = new.packing["codes"] - 1 if shape is None else 0  # unused codes that the last byte may hold
        if shape is None:
            shape = (*codes.shape[:-1], codes.shape[-1] * new.packing["codes"])
        spans = _component_spans(cls, shape, scales.shape, axis, block_size, spare)
        new = new.reshaped(shape, spans)
        _ = new.shape  # raises if the parts do not fit each other
        return new

    def replace(self, **changes: Any) -> Self:
        """The same array with some fields changed."""
        fields, static = self._fields()
        new = object.__new__(type(self))
        kept = {name: self.__dict__[name] for name in (*fields, *static) if name in self.__dict__}
        new.__dict__.update(kept, **changes)
        return new

    # --- what it is

    def part_spans(self) -> dict[str, tuple[int, ...]]:
        """The spans of every part that is there."""
        return {**{name: (n,) if n > 1 else () for name, n in self.packing.items()}, "scales": self.spans}

    def parts(self) -> dict[str, Any]:
        names = (*self.part_spans(), *self.scale_parts)
        return {name: part for name in names if (part := getattr(self, name)) is not None}

    @functools.cached_property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape as stored: the stack that `index` chooses from, the last two axes in their stored order."""
        spans, lengths = self.part_spans(), dict(self.lengths)
        parts = {name: getattr(self, name) for name in spans}
        ranks = {name: len(part.shape) for name, part in parts.items()}
        if len(set(ranks.values())) > 1:
            raise ValueError(
                f"The parts of this {type(self).__name__} no longer have the same number of axes: {ranks}. "
                "Slice, map and shard the array itself, not its parts."
            )
        shape = []
        for axis in range(-ranks["codes"], 0):
            stored = {name: part.shape[axis] for name, part in parts.items()}
            covers = {name: span_of(spans[name], axis) for name in parts}
            known = {stored[name] * covers[name] for name in parts if covers[name] != WHOLE}
            length = lengths.get(axis, min(known, default=1))
            # A part may cover more than there is only in a last block or byte, of whose length `lengths` knows.
            if any(stored[name] != stored_length(length, covers[name]) for name in parts) or (
                axis not in lengths and len(known) > 1
            ):
                raise ValueError(
                    f"The parts of this {type(self).__name__} no longer fit each other on axis {axis}: they have "
                    f"{stored} elements there, covering {covers} array elements each"
                    + (f" of {lengths[axis]}. " if axis in lengths else ". ")
                    + "Slice, map and shard the array itself, not its parts."
                )
            shape.append(length)
        return tuple(shape)

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        shape = self.stored_shape
        if self.index is not None:
            shape = (*self.index.shape, *shape[1:])
        if self.transposed and len(shape) < 2:
            raise ValueError(
                f"This {type(self).__name__} is stored transposed, and its parts have lost an axis: outside of "
                "`implicit`, vmap, scan and slices see the stored order. Take them inside of it."
            )
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape

    @property
    def axis(self) -> tuple[int, ...]:
        """The axes along which elements share a scale, from the end."""
        found = (a for a in range(-len(self.spans), 0) if self.spans[a] != 1)
        return tuple(sorted(self.swapped(a) for a in found))

    @property
    def block_size(self) -> int | None:
        """How many elements share a scale along `axis`; None for all of it."""
        return next((span for span in self.spans if span > 1), None)

    def swapped(self, axis: int) -> int:
        """An axis of the array as a stored one, or back."""
        return -3 - axis if self.transposed and axis in (-1, -2) else axis

    def logical_view(self, part: jax.Array) -> jax.Array:
        """A part in the axis order of the array."""
        return jnp.matrix_transpose(part) if self.transposed else part

    @property
    def weight(self) -> jax.Array:
        """The codes in the axis order of the array."""
        return self.logical_view(self.resolved().codes)

    @property
    def scale(self) -> jax.Array:
        """The scales in the axis order of the array."""
        return self.logical_view(self.resolved().scales)

    # The flag alone: even a compiled identity would copy the parts.

    @property
    def mT(self) -> Self:
        if self.ndim < 2:
            raise ValueError(f"mT needs at least two axes, and the array has the shape {self.shape}.")
        return self.replace(transposed=not self.transposed)

    @property
    def T(self) -> Any:
        return self.mT if self.ndim == 2 else super().T

    # --- back to numbers

    def decode(self) -> jax.Array:
        """The float32 values in stored order, of the layers chosen."""
        array = self.resolved()
        shape = array.stored_shape
        values = array.unpacked_levels(*(getattr(array, name) for name in array.packing), length=shape[-1])
        return values * spread(lax.stop_gradient(array.scale_values()), array.spans, shape)

    def unpacked_levels(self, *code_parts: jax.Array, length: int) -> jax.Array:
        """`levels` of codes as they are packed along the last axis, of which there are `length`."""
        codes = (unpack(part, n) for part, n in zip(code_parts, self.packing.values(), strict=True))
        return self.levels(*(axis_slice(part, -1, 0, length) for part in codes))

    def materialize(self) -> jax.Array:
        return _materialize(self)

    def dequantize(self) -> jax.Array:
        """`materialize()` by its other name."""
        return self.materialize()

    def resolved(self) -> Self:
        index = self.index
        if index is None:
            return self

        def layers(part: jax.Array, _: Any) -> jax.Array:
            if index.ndim == 0:
                return lax.dynamic_index_in_dim(part, index, 0, keepdims=False)
            return jnp.take(part, index, axis=0, mode="clip")

        return self.map_parts(layers, index=None)

    def map_parts(self, fn: Callable[[Any, tuple[int, ...]], Any], **changes: Any) -> Self:
        """The same array with `fn(part, its spans)` in the place of each part."""
        spans = self.part_spans() | dict.fromkeys(self.scale_parts, (WHOLE, WHOLE))
        return self.replace(**{name: fn(part, spans[name]) for name, part in self.parts().items()}, **changes)

    def times(self, number: Any) -> Self:
        """The array multiplied by a number, which the scales take."""
        array = self.plain()
        return array.replace(scales=array.scales * jnp.asarray(number, jnp.float32))

    def divided_by(self, number: Any) -> Self:
        """The array divided by a number, which the scales take."""
        array = self.plain()
        return array.replace(scales=array.scales / jnp.asarray(number, jnp.float32))

    # A number of Python's is a constant, which the compiled operators of the base class would not see.

    def _takes(self, number: Any) -> bool:
        return type(number) in (int, float) and jnp.issubdtype(self.dtype, jnp.floating)

    def __mul__(self, other: Any) -> Any:
        return self.times(other) if self._takes(other) else super().__mul__(other)

    def __rmul__(self, other: Any) -> Any:
        return self.times(other) if self._takes(other) else super().__rmul__(other)

    def __truediv__(self, other: Any) -> Any:
        return self.divided_by(other) if self._takes(other) else super().__truediv__(other)

    def __neg__(self) -> Any:
        return self.times(-1) if self._takes(-1) else super().__neg__()

    def delete(self) -> None:
        """Free the memory of the parts; the array can not be used after."""
        for part in jax.tree.leaves(self):
            part.delete()

    # --- sharding

    @property
    def sharding(self) -> Any:
        """How the array lies over devices, as `jax.Array.sharding` says it."""
        stored: Any = self.codes.sharding
        spec = self.logical_spec()
        return stored if spec is None else NamedSharding(stored.mesh, spec)

    @property
    def is_sharded(self) -> bool:
        """Whether devices hold different pieces of it."""
        return not self.sharding.is_fully_replicated

    def with_sharding(self, sharding: NamedSharding | PartitionSpec | None) -> Self:
        """The array laid out anew, given for its own axes; a PartitionSpec is of the mesh around, None changes nothing.

        >>> import jax, jax.numpy as jnp, lowbit
        >>> mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
        >>> lowbit.Array8B(jnp.ones((64, 32))).with_sharding(sharding).sharding == sharding
        True
        """
        if sharding is None:
            return self
        traced = isinstance(self.codes, Tracer)
        if isinstance(sharding, PartitionSpec):
            mesh = None if traced else mesh_in_context()
            if mesh is None:  # JAX knows the mesh of a `with mesh:`, or says that there is none
                specs = self.part_specs(sharding, jax.sharding.get_abstract_mesh())
                return jax.tree.map(lax.with_sharding_constraint, self, specs)
            sharding = NamedSharding(mesh, sharding)
        place = lax.with_sharding_constraint if traced else jax.device_put
        return jax.tree.map(place, self, self.part_shardings(sharding))

    def reshard(self, sharding: NamedSharding | PartitionSpec | None) -> Self:
        """`with_sharding` by its other name."""
        return self.with_sharding(sharding)

    def with_mesh_and_axis(self, mesh_and_axis: tuple[Any, Any]) -> Self:
        """`with_sharding` of a mesh and a PartitionSpec, its entries, a single name for the first axis, or None."""
        mesh, axis = mesh_and_axis
        entries = () if axis is None else (axis,) if isinstance(axis, str) else axis
        return self.with_sharding(NamedSharding(mesh, PartitionSpec(*entries)))

    def _elements(self, axis: int) -> list[int]:
        """How many elements of the array one of each part covers, where a part has the axis at all."""
        spans = (span_of(spans, self.swapped(axis)) for spans in self.part_spans().values())
        return [span for span in spans if span != WHOLE]

    def part_specs(self, spec: PartitionSpec, mesh: Any = None) -> Any:
        if mesh is not None:
            check_pieces(self.shape, spec, mesh, self._elements)
        entries = [*spec, *[None] * (self.ndim - len(spec))]
        if self.transposed:
            entries[-2:] = entries[:-3:-1]
        if self.index is not None:
            entries[: self.index.ndim] = [None]

        def along(_: Any, spans: tuple[int, ...]) -> PartitionSpec:
            first = -len(entries)
            return PartitionSpec(*(None if span_of(spans, first + i) == WHOLE else e for i, e in enumerate(entries)))

        return self.map_parts(along, index=None if self.index is None else PartitionSpec())

    def logical_spec(self) -> PartitionSpec | None:
        sharding: Any = getattr(self.codes, "sharding", None)
        if not hasattr(sharding, "spec"):
            return None
        if self.transposed and len(self.codes.shape) < 2:
            return None  # `shape` says what is wrong
        spec = (*sharding.spec, *[None] * (len(self.codes.shape) - len(sharding.spec)))
        if self.index is not None:
            spec = (*[None] * self.index.ndim, *spec[1:])
        return PartitionSpec(*spec[:-2], spec[-1], spec[-2]) if self.transposed else PartitionSpec(*spec)


def _defined_at(cls: type, name: str) -> int:
    """The position in the method resolution order of the class that defines an attribute."""
    return next(i for i, base in enumerate(cls.__mro__) if name in vars(base))


def check_pieces(
    shape: Sequence[int], spec: PartitionSpec, mesh: Any, elements: Callable[[int], Sequence[int]] = lambda axis: (1,)
) -> None:
    """Whether devices can have pieces of an array: a block belongs to one of them, and so does a byte.

    `elements(axis)`: how many elements of the array those that are stored cover.
    """
    if len(spec) > len(shape):
        raise ValueError(f"{spec} speaks of {len(spec)} axes, and the array has the shape {tuple(shape)}.")
    sizes = dict(mesh.shape)
    for axis, entry in enumerate(spec, -len(shape)):
        names = () if entry is None or entry is PartitionSpec.UNCONSTRAINED else entry
        names = names if isinstance(names, tuple) else (names,)
        pieces = math.prod(sizes.get(name, 1) for name in names)
        counts = [stored_length(shape[axis], span) for span in elements(axis)]
        if pieces > 1 and any(n % pieces for n in counts):
            fits = next(d for d in range(pieces, 0, -1) if not any(n % d for n in counts))
            block = math.lcm(*elements(axis))
            raise ValueError(
                f"Axis {axis} of length {shape[axis]} cannot be cut over the {pieces} devices of {names}: "
                f"a piece must hold {f'whole blocks of {block} elements' if block > 1 else 'as much as the others'}. "
                f"{fits} {'device' if fits == 1 else 'devices'} would do."
            )


def explicit_axes(*types: Any) -> tuple[str, ...]:
    """The axes of the mesh that are part of the types."""
    mesh = next((mesh for type in types if not (mesh := type.sharding.mesh).empty), None)
    if mesh is None:
        return ()
    return tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit)


@partial(jax.jit, inline=True)  # compiled as one when called eagerly
def _materialize(array: QuantizedArray) -> jax.Array:
    return array.logical_view(array.decode()).astype(array.dtype)


# --- what every `quantize` starts and ends with


def axis_spans(shape: Sequence[int], axis: Any, block_size: int | None) -> tuple[int, ...]:
    """Spans for one scale along `axis` (an int or several), or one for each block of a single axis."""
    ndim = len(shape)
    axes = tuple(operator.index(a) for a in (axis if isinstance(axis, (tuple, list)) else (axis,)))
    for a in axes:
        if not -ndim <= a < ndim:
            raise ValueError(f"axis {a} is out of range for an array of shape {tuple(shape)}.")
    if block_size is not None and len(axes) != 1:
        raise ValueError(f"block_size={block_size} needs a single axis, not {axes}.")
    spans = [1] * ndim
    for a in axes:
        spans[a] = WHOLE if block_size is None else block_size
    return tuple(spans)


def _component_spans(
    cls: type[QuantizedArray],
    shape: Sequence[int],
    scales: Sequence[int],
    axis: Any,
    block_size: int | None,
    spare: int,
) -> list[int]:
    """The spans of scales of a given shape. Raises if `block_size` is not given and more than one would fit."""
    if len(scales) != len(shape):
        raise ValueError(f"A {cls.__name__} of {len(shape)} axes needs scales of as many, not of shape {scales}.")
    if axis is not None:
        spans = list(axis_spans(shape, axis, block_size))
    else:
        spans = [1 if n == stored else WHOLE for n, stored in zip(shape, scales, strict=True)]
        if block_size and all(stored == 1 for span, stored in zip(spans, scales, strict=True) if span == WHOLE):
            spans = [block_size if span == WHOLE else span for span in spans]
    for i, (n, stored) in enumerate(zip(shape, scales, strict=True)):
        if spans[i] == WHOLE and stored > 1:
            at = i - len(shape)
            spans[i] = block_size or _only_block_size(cls, range(n - (spare if at == -1 else 0), n + 1), stored, at)
    return spans


def _only_block_size(cls: type[QuantizedArray], lengths: range, scales: int, axis: int) -> int:
    """The one block size of the format that gives this many scales on an axis of one of these lengths."""
    fits = {size for n in lengths for size in range(-(-n // scales), (n - 1) // (scales - 1) + 1)}
    allowed = fits if cls.block_sizes is None else fits.intersection(cls.block_sizes)
    if len(allowed) != 1:
        found = f"every block size from {min(allowed)} to {max(allowed)}" if allowed else "no block size of the format"
        raise ValueError(
            f"{cls.__name__} has {scales} scales for the {lengths[-1]} elements of axis {axis}, which {found} would "
            "give: pass block_size=, the number of elements that share a scale."
        )
    return allowed.pop()


def checked_dtype(dtype: Any, array: jax.Array, format: str) -> np.dtype:
    """The dtype that the array is to read in, default its own."""
    dtype = np.dtype(array.dtype if dtype is None else dtype)
    if jnp.issubdtype(array.dtype, jnp.floating) and not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dtype={dtype} for {format!r}: a scaled array reads as a floating-point dtype.")
    return dtype


def checked_block_size(block_size: int | None) -> int | None:
    if block_size is not None and block_size < 1:
        raise ValueError(f"block_size={block_size} must be at least 1, or None for one scale along the whole axis.")
    return block_size


def checked_input(array: Any, format: str, *, integers: bool = False) -> jax.Array:
    """The dense array to be quantized, or an error that says what to pass instead."""
    if isinstance(array, ImplicitArray):
        raise TypeError(
            f"Cannot quantize a {type(array).__name__} to {format!r}: it is quantized already. "
            "Pass its .materialize() to quantize it once more."
        )
    array = jnp.asarray(array)
    if not jnp.issubdtype(array.dtype, jnp.floating) and not (
        integers and jnp.issubdtype(array.dtype, jnp.signedinteger)
    ):
        raise TypeError(
            f"Cannot quantize an array of dtype {array.dtype} to {format!r}: pass a floating-point array, "
            "for instance array.astype(jnp.float32)."
        )
    if array.ndim == 0:
        raise ValueError(f"Cannot quantize a scalar to {format!r}: pass an array with at least one axis.")
    return array


def checked_scale(scale: Any, shape: Sequence[int], spans: Sequence[int], format: str) -> jax.Array | None:
    """Scales that were given, if they are as many as the format stores; NaN where they are none."""
    if scale is None:
        return None
    scale = lax.stop_gradient(jnp.asarray(scale, jnp.float32))
    want = tuple(stored_length(length, span) for length, span in zip(shape, spans, strict=True))
    if scale.shape != want:
        raise ValueError(f"scale= for {format!r} has the shape {scale.shape}, and the array needs scales of {want}.")
    usable = (scale > 0) & jnp.isfinite(scale)
    if not isinstance(scale, Tracer) and not bool(usable.all()):
        first = tuple(int(i) for i in np.argwhere(~np.asarray(usable))[0])
        raise ValueError(
            f"scale= for {format!r} must be positive: {int((~usable).sum())} of {scale.size} are not, "
            f"the first is {scale[first]} at {first}."
        )
    return jnp.where(usable, scale, jnp.nan)


def finite_or_nan(scales: jax.Array) -> jax.Array:
    """Scales as stored: a block with NaN or infinity in it gets a NaN, and so reads as NaN."""
    scales = scales.astype(jnp.float32)
    return jnp.where(jnp.isfinite(scales), scales, jnp.nan)


def raise_if_not_finite(array: jax.Array, scales: jax.Array, format: str) -> None:
    """Outside of a trace, say what is wrong with the input. Reads the scales; the input only to say where."""
    if isinstance(scales, Tracer) or not bool(jnp.isnan(scales).any()):
        return
    # A float64 beyond float32 is finite, but its scale is not.
    with np.errstate(over="ignore"):
        bad = ~np.isfinite(np.asarray(array).astype(np.float32))
    if not bad.any():
        raise ValueError(f"Cannot quantize to {format!r}: values up to {np.abs(array).max()} overflow float32 sums.")
    first = tuple(int(i) for i in np.argwhere(bad)[0])
    raise ValueError(
        f"Cannot quantize to {format!r}: {int(bad.sum())} of {array.size} values are NaN or infinite in float32, "
        f"the first is {array[first]} at {first}."
    )


# --- the table of formats


@dataclasses.dataclass(frozen=True)
class Format:
    """A row of the table: how to quantize to a format, and what it costs.

    - `quantize`: a function of `(array, *, axis, block_size)` and the options.
    - `error`: root mean square error on N(0, 1), in its default setting.
    - `bits`: per weight, scales not counted.
    - `blocked`: whether it always has blocks; otherwise a scale covers the axis if no block is asked for.
    - `options`: what else `quantize` takes of a `QuantizationConfig`.
    - `top`: the largest level. Only of formats whose `quantize` takes `scale=`, the scales to round by.
    - `scale_of_max`: the scales from the largest |w| that they cover, for formats whose scales need no other number.
    """

    name: str
    quantize: Callable[..., QuantizedArray]
    error: float
    bits: float
    blocked: bool = True
    options: frozenset[str] = frozenset()
    top: float | None = None
    scale_of_max: Callable[[jax.Array], jax.Array] | None = None


FORMATS: dict[str, Format] = {}
"""The table of formats by name. `register_format` adds to it.

>>> import lowbit
>>> lowbit.FORMATS["nf4"].bits
4.0
"""


def register_format(format: Format, *, replace: bool = False) -> Format:
    """Add a row: from then on every test, tool and `quantize` knows the format by its name.

    A name that another format has raises a `ValueError`, unless `replace` says that this one takes its place.

    >>> import lowbit
    >>> lowbit.register_format(lowbit.FORMATS["int8"]).name  # the same once more
    'int8'
    """
    known = FORMATS.get(format.name)
    if known is not None and known != format and not replace:
        raise ValueError(
            f"There is a format {format.name!r} already, made by {known.quantize!r}: choose another name, or pass "
            "replace=True to put this one in its place."
        )
    FORMATS[format.name] = format
    return format
