"""The arrays and `quantize`, with eformer's documented behavior where lowbit does more."""

import dataclasses
import functools
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

import lowbit
from lowbit import QuantizationType as QuantizationType
from lowbit import matmul_bf16_int8_weight_only as matmul_bf16_int8_weight_only
from lowbit import safe_materialize as safe_materialize
from lowbit.config import format_options
from lowbit.formats import stored
from lowbit.formats.onebit import Kind

from . import functions

Fields = tuple[tuple[str, ...], tuple[str, ...]]


@stored
class _Eformer(lowbit.QuantizedArray):
    """Takes fields by position in eformer's order; NaN does not raise in `quantize` and makes its block NaN."""

    positional: ClassVar[tuple[str, ...]] = ()
    # The stored components; `dataclasses.fields` lists the documented fields instead.
    stored_fields: ClassVar[Fields] = ((), ())
    documented: ClassVar[tuple[str, ...]] = ()

    @classmethod
    @functools.cache
    def _fields(cls) -> Fields:
        # A subclass may add fields of its own.
        known = {*cls.documented, *cls.stored_fields[0], *cls.stored_fields[1]}
        arrays, static = (tuple(n for n in names if n not in known) for names in super()._fields())
        return (*cls.stored_fields[0], *arrays), (*cls.stored_fields[1], *static)

    def __init__(self, *given: Any, sharding: Any = None, **named: Any):
        if len(given) > 1:
            if len(given) > len(self.positional):
                raise TypeError(
                    f"{type(self).__name__} takes at most {', '.join(self.positional)}, but got {len(given)} values."
                )
            named = {**dict(zip(self.positional, given, strict=False)), **named}
            given, sharding = (), named.pop("sharding", sharding)
        super().__init__(*given, **named)
        if sharding is not None:
            self.__dict__.update(self.with_sharding(sharding).__dict__)


def _documented(cls: Any) -> Any:
    """Give a class the dataclass fields that eformer documents instead of the stored components."""
    names = ("shape", "dtype", *cls.positional)
    cls.stored_fields, cls.documented = cls.__bases__[1]._fields(), names
    made = dataclasses.make_dataclass(cls.__name__, [(name, Any, dataclasses.field(default=None)) for name in names])
    cls.__dataclass_fields__ = made.__dataclass_fields__
    return cls


def _quietly(cls: type, array: Any, **options: Any) -> Any:
    """Quantize under jit, where values cannot be checked for NaN."""
    array = array if isinstance(array, lowbit.ImplicitArray) else jnp.asarray(array)
    return _compiled(cls, tuple(options.items()))(array)


@functools.cache
def _compiled(cls: Any, options: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(lambda array: super(cls, cls).quantize(array, **dict(options)))


def _hashable(axis: Any) -> Any:
    return tuple(axis) if isinstance(axis, list) else axis


@_documented
@stored
class Array8B(_Eformer, lowbit.Array8B):
    """int8 with a scale: `Array8B(scale, weight, axis)` or `Array8B(array)`."""

    component_names: ClassVar[dict[str, str]] = {"scale": "scales", "weight": "codes"}
    positional: ClassVar[tuple[str, ...]] = ("scale", "weight", "axis", "sharding")

    @classmethod
    def quantize(cls, array: Any, dtype: Any = None, axis: Any = None, **options: Any) -> Self:
        return _quietly(Array8B, array, dtype=dtype, axis=-1 if axis is None else _hashable(axis), **options)


@_documented
@stored
class ArrayNF4(_Eformer, lowbit.ArrayNF4):
    """NF4: `ArrayNF4(packed, absmax, block_size)` or `ArrayNF4(array)`."""

    positional: ClassVar[tuple[str, ...]] = ("packed", "absmax", "block_size", "sharding")

    @classmethod
    def from_components(cls, *, packed: Any = None, absmax: Any = None, **given: Any) -> Self:
        if packed is not None and absmax is not None and jnp.ndim(packed) == jnp.ndim(absmax) + 1:
            packed = functions.joined(packed)  # (..., blocks, bytes of a block)
        components = {
            name: component for name, component in (("packed", packed), ("absmax", absmax)) if component is not None
        }
        return super().from_components(**components, **given)

    @classmethod
    def quantize(cls, array: Any, block_size: int = 64, *, axis: int | None = None, **options: Any) -> Self:
        return _quietly(ArrayNF4, array, block_size=block_size, axis=-1 if axis is None else axis, **options)


@_documented
@stored
class Array1B(_Eformer, lowbit.Array1B):
    """Codes {-1, 0, 1} without a scale: `Array1B(array)`, or `Array1B(weight=...)` from `pack_weights_1bit`."""

    positional: ClassVar[tuple[str, ...]] = ("weight", "scale", "kind")

    @classmethod
    def from_components(cls, *, weight: Any = None, dtype: Any = jnp.int8, **given: Any) -> Self:
        if "scale" in given:
            return super().from_components(weight=weight, dtype=dtype, **given)
        return cls.quantize(functions.unpack_weights_1bit(weight, jnp.int8), dtype=dtype)

    @classmethod
    def quantize(
        cls,
        array: Any,
        dtype: Any = None,
        axis: Any = None,
        *,
        kind: Kind = "ternary",
        scale: Any = False,
        block_size: int | None = None,
        **options: Any,
    ) -> Self:
        if jnp.issubdtype(jnp.result_type(array), jnp.integer):  # checked and kept, as lowbit does
            return super().quantize(array, dtype=dtype, axis=-1 if axis is None else _hashable(axis), kind=kind)
        if axis is None and block_size is None:
            axis = tuple(range(jnp.ndim(array)))  # one threshold for the whole array
        axis = -1 if axis is None else axis
        options |= {"kind": kind, "scale": scale, "block_size": block_size}
        return _quietly(Array1B, array, dtype=dtype, axis=_hashable(axis), **options)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Operator(lowbit.ImplicitArray):
    """An integer matrix of few distinct values in 2 bits each, with eformer's names for its product."""

    matrix: Array1B
    source_dtype: Any = lowbit.aux_field(default=jnp.int32)

    values: ClassVar[tuple[int, ...]] = ()

    @classmethod
    def from_matrix(cls, A: Any, k: int = 8, org_dtype: Any = jnp.float32) -> Self:
        """From an integer matrix with no other values than `values`; `k`, eformer's block width, has no effect."""
        del k
        name = cls.__name__
        if not isinstance(A, Tracer):
            A = np.asarray(A)
        if not jnp.issubdtype(A.dtype, jnp.integer):
            raise TypeError(f"{name}.from_matrix needs an integer matrix, but A is {A.dtype}: use A.astype(jnp.int32).")
        if A.ndim != 2:
            raise ValueError(f"{name}.from_matrix needs a matrix, but A has shape {A.shape}.")
        if not isinstance(A, Tracer) and not np.isin(A, cls.values).all():
            raise ValueError(f"{name} needs a matrix of values {cls.values}, but A has other values.")
        return cls(Array1B.quantize(jnp.asarray(A, jnp.int8), dtype=org_dtype), source_dtype=A.dtype)

    def dot(self, v: jax.Array) -> jax.Array:
        """v @ A of one vector, without the dense matrix; `v @ operator` takes any number of rows."""
        if jnp.shape(v) != self.shape[:1]:
            raise ValueError(f"dot needs a vector of shape {self.shape[:1]}, but v has shape {jnp.shape(v)}.")
        return v @ self.matrix

    def materialize(self) -> jax.Array:
        return self.matrix.materialize().astype(self.source_dtype)


@lowbit.register("dot_general")
def _(x: jax.Array, operator: _Operator, **params: Any) -> Any:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return NotImplemented
    return lowbit.implicit(lambda x, w: jax.lax.dot_general(x, w, **params))(x, operator.matrix.astype(x.dtype))


@lowbit.register("convert_element_type")
def _(operator: _Operator, *, new_dtype: Any, weak_type: bool) -> Any:
    # Older versions of JAX bring both sides of a product to one dtype first.
    return operator.matrix.astype(new_dtype) if jnp.issubdtype(new_dtype, jnp.floating) else NotImplemented


class RSROperatorBinary(_Operator):
    """A matrix of zeros and ones."""

    values: ClassVar[tuple[int, ...]] = (0, 1)

    @classmethod
    def quantize(cls, A: Any, k: int = 8) -> Self:
        return cls.from_matrix(A, k)


class RSROperatorTernary(_Operator):
    """A matrix of -1, 0 and 1."""

    values: ClassVar[tuple[int, ...]] = (-1, 0, 1)


_BARE: dict[str, Kind] = {"ternary": "ternary", "binary": "binary"}
_CLASSES: dict[str, Any] = {"int8": Array8B, "nf4": ArrayNF4}


@dataclasses.dataclass(frozen=True)
class QuantizationConfig(lowbit.QuantizationConfig):
    """`lowbit.QuantizationConfig` with a default block size of 64, which applies to NF4 alone."""

    block_size: int | None = 64


def _config(config: lowbit.QuantizationConfig | str | None, dtype: Any, **given: Any) -> lowbit.QuantizationConfig:
    """The config, which takes precedence over the other arguments, or one made of them."""
    if isinstance(config, lowbit.QuantizationConfig):
        return config
    if config is not None and not isinstance(config, str):
        raise TypeError(f"config must be a QuantizationConfig or the name of a format, not {config!r}.")
    return QuantizationConfig(config or dtype or QuantizationType.NF4, **given)


def _quantize(array: Any, config: lowbit.QuantizationConfig) -> Any:
    if config.dtype in _BARE:
        quantized = Array1B.quantize(array, kind=_BARE[config.dtype])
    else:
        options = format_options(config)
        if not config.format.blocked:
            options.pop("block_size", None)
        quantized = _CLASSES[config.dtype].quantize(array, **options)
    return quantized.replace(use_kernel=config.use_kernel, compute=config.compute)


def quantize(
    array: Any,
    config: lowbit.QuantizationConfig | str | None = None,
    dtype: Any = None,
    block_size: int = 64,
    simulate: bool = False,
) -> Any:
    """As `lowbit.quantize`, but with codes without a scale for "binary" and "ternary", and blocks for NF4 alone.

    A `config` takes precedence over the other arguments.
    """
    config = _config(config, dtype, block_size=block_size, simulate=simulate)
    return straight_through(array, config) if config.simulate else _quantize(array, config)


def straight_through(
    array: Any, config: lowbit.QuantizationConfig | str | None = None, dtype: Any = None, block_size: int = 64
) -> jax.Array:
    """The dense value of `quantize(array, ...)`, with a straight-through gradient."""
    config = _config(config, dtype, block_size=block_size)
    return lowbit.ste(lambda array: _quantize(array, config))(array)


def straight_through_nf4(weights: jax.Array, block_size: int = 64) -> jax.Array:
    """`ArrayNF4.quantize(weights, block_size)` dense, with a straight-through gradient."""
    return straight_through(weights, dtype="nf4", block_size=block_size)


def straight_through_8bit(weights: jax.Array, axis: Any = None) -> jax.Array:
    """`Array8B.quantize(weights, axis=axis)` dense, with a straight-through gradient."""
    return straight_through(weights, QuantizationConfig("int8", axis=_hashable(axis)))


def straight_through_1bit(weights: jax.Array, axis: Any = None) -> jax.Array:
    """`quantize(weights, dtype="ternary")` dense, with a straight-through gradient."""
    del axis  # without a scale there is no axis to share it along
    return straight_through(weights, dtype="ternary")


def safe_delete(arr: Any, materialized: bool) -> None:
    """Do nothing: arrays are freed when the last reference to them goes."""
