"""QuantizedArray: the base class of all formats.

A format is a subclass with its components, `quantize` and `levels`, and a row in the table of formats.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding

from lowbit.runtime import aux_field

from .blocks import WHOLE, axis_slice, span_of, spread, stored_length, trimmed, unfused, unpack
from .components import CODE_DTYPES, SCALE_DTYPES, check_codes, check_dtypes, spans_of_scales
from .sharding import ShardedArray, check_shards
from .table import Format, format_of

# Components are frozen fields that are passed by their documented names, so one `__init__` serves every format.
stored = dataclasses.dataclass(frozen=True, init=False, eq=False, repr=False)
"""Decorator for a class of quantized arrays: a frozen dataclass that keeps the constructor of `QuantizedArray`."""

KEEP = "keep the leaf by a pattern to None"  # in errors of `with_scales`


@stored
class QuantizedArray(ShardedArray):
    """An array stored as codes and scales. Its value is `level(code) * scale`, computed in float32, as `dtype`.

    - Every component has the rank and the axis order of the array, with a span for each axis (see `blocks`).
    - Codes are packed along the last stored axis, `packing[component]` of them in each stored element.
    - `transposed`: the last two axes are stored swapped.
    - `index`: selects layers of the first stored axis: `shape == index.shape + (shape of a layer)`. Only inside
      `implicit`; results of it have their layers gathered.
    - `spans` and `lengths` count stored axes from the end, so that leading axes may be added and removed.
    - `lengths`: the lengths of axes whose last byte or block is not full; others follow from the components.
    - The components are constants: gradients stop at them.
    - `use_kernel`, `compute`: how its products run; the settings of these names take precedence.
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

    # The documented names of the components, in the order of the constructor.
    component_names: ClassVar[dict[str, str]] = {"weight": "codes", "scale": "scales"}
    # Optional components from which `scale_values` decodes; their leading axes are those of the array.
    scale_components: ClassVar[tuple[str, ...]] = ()
    # The allowed dtypes of codes.
    code_dtypes: ClassVar[tuple[np.dtype, ...]] = CODE_DTYPES
    # The allowed block sizes; None for any.
    block_sizes: ClassVar[tuple[int, ...] | None] = None

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        # A subclass with its own levels or packing cannot use a kernel's decoder for those of its base.
        for name in ("decoder", "int8_multiplier"):
            if min(_defined_at(cls, "levels"), _defined_at(cls, "packing")) < _defined_at(cls, name):
                setattr(cls, name, None)

    # --- what a format declares

    @property
    def packing(self) -> dict[str, int]:
        """How many codes one stored element of each code component holds along the last stored axis."""
        return {"codes": 1}

    def levels(self, *codes: jax.Array) -> jax.Array:
        """The float32 values of codes before scaling, element by element; one array of codes for each code component.

        Law: `materialize() == levels(...) * scale`. It must be plain jnp on codes of any shape and integer type and
        use static fields only, since kernels call it on their tiles.
        """
        raise NotImplementedError

    @classmethod
    def quantize(cls, array: Any, *args: Any, **options: Any) -> Self:
        """Quantize a dense array."""
        raise NotImplementedError

    def scale_values(self) -> jax.Array:
        """The scales as float32, however they are stored: bfloat16 and float16 in an array that was cast."""
        return self.scales if self.scales.dtype == jnp.float32 else self.scales.astype(jnp.float32)

    def with_scales(self, scales: jax.Array) -> Self:
        """The same codes with other scales, in the shape of `scale_values`, rounded as the array stores them."""
        if self.coded_scales() is not None:
            raise ValueError(
                f"{type(self).__name__} has double-quantized scales, which cannot be replaced: {KEEP}, or decode them "
                "with plain()."
            )
        return self.replace(scales=self.checked_scales(scales).astype(self.scales.dtype))

    def checked_scales(self, scales: Any) -> jax.Array:
        """Scales as float32; raises if their shape does not fit, or if some are known not to be finite."""
        scales = jnp.asarray(scales, jnp.float32)
        if scales.shape != self.scales.shape:
            raise ValueError(
                f"Scales of shape {scales.shape} do not fit an array of shape {self.shape}, whose scales are "
                f"{self.scales.shape}."
            )
        if not isinstance(scales, Tracer) and (bad := int((~jnp.isfinite(scales)).sum())):
            raise ValueError(f"{bad:,} of {scales.size:,} scales are NaN or infinite.")
        return scales

    def offset_values(self) -> jax.Array | None:
        """The offsets as float32, with the spans of the scales; None if there are none."""
        return None

    def without_offsets(self) -> Self:
        """The same array with offsets of 0."""
        return self

    @property
    def scale_like(self) -> tuple[str, ...]:
        """The components with the spans of the scales."""
        return ("scales",) if getattr(self, "offsets", None) is None else ("scales", "offsets")

    def component_dtypes(self) -> dict[str, tuple[np.dtype, ...]]:
        """The allowed dtypes of each component. `shape` raises if a component has another."""
        coded = any(getattr(self, name) is not None for name in self.scale_components)
        scales = (np.dtype(np.uint8),) if coded else SCALE_DTYPES
        codes = dict.fromkeys(self.packing, self.code_dtypes)
        return codes | {"scales": scales} | dict.fromkeys(self.scale_components, SCALE_DTYPES)

    @property
    def code_range(self) -> tuple[int, int] | None:
        """The lowest and highest code that has a level; None if all codes have one."""
        return None

    @property
    def decoder(self) -> str | np.ndarray | None:
        """How the native library decodes: the levels of all codes, or a name; None if it cannot.

        A subclass with `levels` or `packing` of its own does not inherit it, nor `int8_multiplier`.
        """
        return None

    @property
    def int8_multiplier(self) -> int | None:
        """Multiplier that maps levels to int8, rounded unless it is 1; None if they do not fit."""
        return None

    @property
    def scale_codec(self) -> str | None:
        """The name in the native library of what scale codes mean; None if scales are floats, or it does not know."""
        return None

    def coded_scales(self) -> tuple[Any, Any, Any, Any] | None:
        """Scales stored as codes: the codes, the group scales, the offset, the table of the codes; None otherwise."""
        return None

    def plain(self) -> Self:
        """The same array with its scales decoded, so that they can be sliced and moved. No value changes."""
        if all(getattr(self, name) is None for name in self.scale_components):
            return self
        return self.replace(scales=self.scale_values(), **dict.fromkeys(self.scale_components))

    def with_coded_scales(self) -> Self:
        """The same array with its scales encoded into `scale_components`. Reads the scales alone."""
        raise NotImplementedError

    # --- constructors

    def __init__(self, *components: Any, **given: Any):
        names = list(self.component_names)
        if len(components) > len(names):
            raise TypeError(
                f"{type(self).__name__} takes one array to quantize, or its components {', '.join(names)}, "
                f"and got {len(components)} positional arguments."
            )
        if len(components) == 1 and not any(name in given for name in names):
            array = type(self).quantize(components[0], **given)
        else:
            array = self.from_components(**dict(zip(names, components, strict=False)), **given)
        self.__dict__.update(array.__dict__)

    @classmethod
    def build(cls, *, shape: Sequence[int], dtype: Any, spans: Sequence[int], **fields: Any) -> Self:
        """An array of stored `shape` from its fields, by their own names."""
        new = object.__new__(cls)
        defaults = {"index": None, "transposed": False, "lengths": (), "use_kernel": True, "compute": "exact"}
        defaults |= {name: None for name in cls._fields()[0] if getattr(cls, name, 0) is None}
        new.__dict__.update(defaults, dtype=np.dtype(dtype), **fields)
        new = new.reshaped(shape, spans)
        where = None if isinstance(new.codes, Tracer) else getattr(new.codes, "sharding", None)
        if isinstance(where, NamedSharding) and not where.is_fully_replicated:
            check_shards(new.stored_shape, where.spec, where.mesh, new._elements)
        return new

    def reshaped(self, shape: Sequence[int], spans: Sequence[int], **changes: Any) -> Self:
        """The array with other components, of another stored shape."""
        new = self.replace(spans=trimmed(spans), **changes)
        covers = new.component_spans().values()
        lengths = (
            (axis, shape[axis])
            for axis in range(-len(shape), 0)
            if any((span := span_of(spans, axis)) > 1 and shape[axis] % span for spans in covers)
        )
        return new.replace(lengths=tuple(lengths))

    @classmethod
    def from_components(
        cls,
        *,
        shape: Sequence[int] | None = None,
        dtype: Any = np.float32,
        axis: Any = None,
        block_size: int | None = None,
        **components: Any,
    ) -> Self:
        """Build an array from its components by their documented names.

        Pass `shape` if the last byte of a row is not full, and `block_size` if more than one would give this number of
        scales, for instance if the last block may be short. Raises a `ValueError` if the block size is ambiguous.
        """
        own = {n for c, b in zip(cls._fields(), QuantizedArray._fields(), strict=True) for n in c if n not in b}
        missing = [name for name in cls.component_names if name not in components]
        unknown = [name for name in components if name not in {*cls.component_names, *own}]
        if missing or unknown:
            raise TypeError(
                f"{cls.__name__} is made of {', '.join((*cls.component_names, *sorted(own)))}: "
                f"missing {missing or 'none'}, not known {unknown or 'none'}."
            )
        defaults = {name: getattr(cls, name) for name in own if hasattr(cls, name)}
        components = {**dict.fromkeys(cls.scale_components), **defaults, **components}
        fields = {field: jnp.asarray(components.pop(name)) for name, field in cls.component_names.items()}
        codes, scales = fields["codes"], fields["scales"]
        new = cls.build(shape=(), dtype=dtype, spans=(), **fields, **components)
        spare = new.packing["codes"] - 1 if shape is None else 0  # unused codes that the last byte may hold
        if shape is None:
            shape = (*codes.shape[:-1], codes.shape[-1] * new.packing["codes"])
        spans = spans_of_scales(cls, shape, scales.shape, axis, block_size, spare)
        new = new.reshaped(shape, spans)
        _ = new.shape  # raises if the components do not fit each other
        check_codes(new)
        return new

    def replace(self, **changes: Any) -> Self:
        """The same array with some fields changed."""
        fields, static = self._fields()
        new = object.__new__(type(self))
        kept = {name: self.__dict__[name] for name in (*fields, *static) if name in self.__dict__}
        new.__dict__.update(kept, **changes)
        return new

    # --- shape and axes

    def component_spans(self) -> dict[str, tuple[int, ...]]:
        """The spans of every component."""
        return {**{name: (n,) if n > 1 else () for name, n in self.packing.items()}, "scales": self.spans}

    def components(self) -> dict[str, Any]:
        names = (*self.component_spans(), *self.scale_components)
        return {name: component for name in names if (component := getattr(self, name)) is not None}

    @functools.cached_property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape as stored: before `index` selects layers, with the last two axes in their stored order."""
        check_dtypes(self)
        spans, lengths = self.component_spans(), dict(self.lengths)
        components = {name: getattr(self, name) for name in spans}
        ranks = {name: len(component.shape) for name, component in components.items()}
        if len(set(ranks.values())) > 1:
            raise ValueError(
                f"The components of this {type(self).__name__} no longer have the same number of axes: {ranks}. "
                "Slice, map and shard the array itself, not its components."
            )
        shape = []
        for axis in range(-ranks["codes"], 0):
            stored = {name: component.shape[axis] for name, component in components.items()}
            covers = {name: span_of(spans[name], axis) for name in components}
            known = {stored[name] * covers[name] for name in components if covers[name] != WHOLE}
            length = lengths.get(axis, min(known, default=1))
            # A component may cover more than the axis only in a last block or byte, which `lengths` records.
            if any(stored[name] != stored_length(length, covers[name]) for name in components) or (
                axis not in lengths and len(known) > 1
            ):
                raise ValueError(
                    f"The components of this {type(self).__name__} no longer fit each other on axis {axis}: they have "
                    f"{stored} elements there, covering {covers} array elements each"
                    + (f" of {lengths[axis]}. " if axis in lengths else ". ")
                    + "Slice, map and shard the array itself, not its components."
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
                f"This {type(self).__name__} is stored transposed, and its components have lost an axis: outside of "
                "`implicit`, vmap, scan and slices see the stored order. Take them inside of it."
            )
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape

    @property
    def axis(self) -> int | tuple[int, ...]:
        """The axis along which elements share a scale, counted from the end; a tuple if there are several or none."""
        axes = self.scale_axes
        return axes[0] if len(axes) == 1 else axes

    @property
    def scale_axes(self) -> tuple[int, ...]:
        """The axes along which elements share a scale, as a tuple."""
        found = (a for a in range(-len(self.spans), 0) if self.spans[a] != 1)
        return tuple(sorted(self.swapped(a) for a in found))

    @property
    def block_size(self) -> int | None:
        """The number of elements along `axis`, along each of several, that share a scale; None for the whole axis."""
        return next((span for span in self.spans if span > 1), None)

    def swapped(self, axis: int) -> int:
        """Map an axis of the array to its stored axis, or back."""
        return -3 - axis if self.transposed and axis in (-1, -2) else axis

    def logical_view(self, component: jax.Array) -> jax.Array:
        """A component in the axis order of the array."""
        return jnp.matrix_transpose(component) if self.transposed else component

    @property
    def weight(self) -> jax.Array:
        """The codes in the axis order of the array."""
        return self.logical_view(self.resolved().codes)

    @property
    def scale(self) -> jax.Array:
        """The scales in the axis order of the array."""
        return self.logical_view(self.resolved().scales)

    # These change a flag; even a compiled identity would copy the components.

    @property
    def mT(self) -> Self:
        if self.ndim < 2:
            raise ValueError(f"mT needs at least two axes, and the array has the shape {self.shape}.")
        return self.replace(transposed=not self.transposed)

    @property
    def T(self) -> Any:
        return self.mT if self.ndim == 2 else super().T

    # --- decoding

    def decode(self) -> jax.Array:
        """The float32 values of the selected layers, in stored order."""
        array = self.resolved()
        shape = array.stored_shape
        values = array.unpacked_levels(*(getattr(array, name) for name in array.packing), length=shape[-1])
        return array.scaled(values, partial(spread, spans=array.spans, shape=shape))

    def scaled(self, levels: jax.Array, spread: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """`levels * scale + offset`, with each product rounded; `spread` gives a scale to each element."""
        values = levels * spread(lax.stop_gradient(self.scale_values()))
        offsets = self.offset_values()
        return values if offsets is None else unfused(values) + spread(lax.stop_gradient(offsets))

    def unpacked_levels(self, *code_components: jax.Array, length: int) -> jax.Array:
        """`levels` of packed codes, `length` of them along the last axis."""
        codes = (unpack(component, n) for component, n in zip(code_components, self.packing.values(), strict=True))
        return self.levels(*(axis_slice(component, -1, 0, length) for component in codes))

    def materialize(self) -> jax.Array:
        return _materialize(self)

    def dequantize(self) -> jax.Array:
        """An alias of `materialize`."""
        return self.materialize()

    def resolved(self) -> Self:
        if self.index is None:
            return self
        return self.map_components(lambda component, _: self.selected(component), index=None)

    def selected(self, component: jax.Array) -> jax.Array:
        """The layers of a component that `index` selects."""
        if self.index is None:
            return component
        if self.index.ndim == 0:
            return lax.dynamic_index_in_dim(component, self.index, 0, keepdims=False)
        return jnp.take(component, self.index, axis=0, mode="clip")

    def movable(self, axes: Sequence[int]) -> Self:
        """The array in a form whose elements can be moved along these stored axes, counted from the front.

        Its scales are decoded (`plain`) if they are stored as codes, and one group scale covers more than one element
        along one of these axes.
        """
        spans = self.component_spans() | dict.fromkeys(self.scale_components, (WHOLE, WHOLE))
        groups = {name for name in self.components() if name not in (*self.packing, *self.scale_like)}
        ndim = len(self.codes.shape)
        keeps = all(span_of(spans[name], axis - ndim) == 1 for name in groups for axis in axes)
        return self if keeps else self.plain()

    def map_components(self, fn: Callable[[Any, tuple[int, ...]], Any], **changes: Any) -> Self:
        """The same array with each component replaced by `fn(component, spans)`."""
        spans = self.component_spans() | dict.fromkeys(self.scale_components, (WHOLE, WHOLE))
        return self.replace(
            **{name: fn(component, spans[name]) for name, component in self.components().items()}, **changes
        )

    def times(self, number: Any) -> Self:
        """Multiply the array by a number: the scales, which become float32, are multiplied."""
        return self._scaled_by(lambda scales: scales * jnp.asarray(number, jnp.float32))

    def divided_by(self, number: Any) -> Self:
        """Divide the array by a number: the scales are divided."""
        return self._scaled_by(lambda scales: scales / jnp.asarray(number, jnp.float32))

    def _scaled_by(self, fn: Callable[[jax.Array], jax.Array]) -> Self:
        array = self.plain()
        scaled = {name: getattr(array, name) for name in array.scale_like}
        # Zero points, which are integers, are in units of the scales.
        floats = {name: values for name, values in scaled.items() if jnp.issubdtype(values.dtype, jnp.floating)}
        return array.replace(**{name: fn(values.astype(jnp.float32)) for name, values in floats.items()})

    # Python numbers are handled here, since the compiled operators of the base class would trace them.

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

    @property
    def format(self) -> Format | None:
        """The row of the table of formats; None for a class that is not in it.

        >>> import jax.numpy as jnp, lowbit
        >>> lowbit.quantize(jnp.ones((64, 32)), "binary").format.name
        'binary'
        """
        return format_of(self)

    @property
    def format_label(self) -> str | None:
        """The name of the format; None for a class that is not in the table."""
        return self.format.name if self.format else None

    def _facts(self) -> list[str]:
        name = [repr(self.format_label)] if self.format_label else []
        shared = [f"axis={self.axis}", f"block_size={self.block_size}"] if self.scale_axes else []
        bits = [f"{8 * self.nbytes / self.size:.4g} bits per weight"] if self.size else []
        where: Any = getattr(self.codes, "sharding", None)
        placed = isinstance(where, NamedSharding) and not where.is_fully_replicated
        sharding = [f"sharded over {dict(where.mesh.shape)} as {self.logical_spec()}"] if placed else []
        *shape, size = super()._facts()
        return [*name, *shape, *shared, *bits, size, *sharding]

    def delete(self) -> None:
        """Free the memory of the components. The array cannot be used afterwards."""
        for component in jax.tree.leaves(self):
            component.delete()


def _defined_at(cls: type, name: str) -> int:
    """The position in the method resolution order of the class that defines an attribute."""
    return next(i for i, base in enumerate(cls.__mro__) if name in vars(base))


@partial(jax.jit, inline=True)  # compiled as one when called eagerly
def _materialize(array: QuantizedArray) -> jax.Array:
    return array.logical_view(array.decode()).astype(array.dtype)
