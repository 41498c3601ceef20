"""ImplicitArray: an object that JAX code uses as an array, whose dense values are not stored."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey

from ._compat import asks_for_type
from ._indexing import DENSE_TYPES, OPERAND, get_item, joined_index, split_indices

_STATIC = "lowbit_static"
OPERAND_TYPES = (*DENSE_TYPES, bool, int, float, complex)


def aux_field(**kwargs: Any) -> Any:
    """Declare a static dataclass field: it belongs to the array's type, is compared and hashed, and never traced.

    >>> import dataclasses, jax.numpy as jnp, lowbit
    >>> @dataclasses.dataclass
    ... class Eye(lowbit.ImplicitArray):
    ...     n: int = lowbit.aux_field()
    ...
    ...     def materialize(self):
    ...         return jnp.eye(self.n)
    >>> Eye(3).shape
    (3, 3)
    """
    metadata = {**kwargs.pop("metadata", {}), _STATIC: True}
    return dataclasses.field(metadata=metadata, **kwargs)


def _both_sides(fn: Callable[[Any, Any], Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def on_the_left(self: Any, other: Any) -> Any:
        if not isinstance(other, (*OPERAND_TYPES, ImplicitArray)):
            return NotImplemented
        return operate(fn, self, other)

    def on_the_right(self: Any, other: Any) -> Any:
        return operate(fn, other, self) if isinstance(other, OPERAND_TYPES) else NotImplemented

    return on_the_left, on_the_right


def _unary(fn: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda self: operate(fn, self)


class ImplicitArray:
    """Base class of arrays without dense values: subclass it as a dataclass and implement `materialize`.

    - Fields are arrays or pytrees of arrays, and pytree children; fields made by `aux_field` are static.
    - Instances are never changed in place.
    - JAX unflattens with arbitrary objects as fields, so unflattening calls no `__init__` and checks nothing.
    - `vmap` and `scan` add and remove leading axes of every field: `materialize` must support that.
    - `shape` and `dtype` are those of `materialize()`; override them where that is cheaper.
    - The methods of `jax.Array` that compute something (`sum`, `max`, `take`, `at[...].set`, ...) are available and
      run as inside `implicit`; a field of a subclass with such a name takes precedence.
    """

    # Try a rule for (this, dense) also for (dense, this) when the operation commutes.
    commute_ops: ClassVar[bool] = True
    # Whether the "warn" policy warns when an array of this class goes dense.
    warn_on_materialize: ClassVar[bool] = True

    # Makes numpy defer `ndarray @ implicit` to this class.
    __array_ufunc__ = None

    def __init_subclass__(
        cls,
        *,
        commute_ops: bool | None = None,
        warn_on_materialize: bool | None = None,
        **kwargs: Any,
    ):
        super().__init_subclass__(**kwargs)
        if commute_ops is not None:
            cls.commute_ops = commute_ops
        if warn_on_materialize is not None:
            cls.warn_on_materialize = warn_on_materialize
        # `@dataclass` keeps what the class itself defines; its own would compare fields and print dense values.
        for name in ("__eq__", "__repr__"):
            if name not in cls.__dict__:
                setattr(cls, name, getattr(cls, name))
        jax.tree_util.register_pytree_with_keys(cls, cls._flatten_with_keys, cls._unflatten, cls._flatten)

    def materialize(self) -> jax.Array:
        """The dense array. Every rule must agree with the primitive on it."""
        raise NotImplementedError(f"{type(self).__name__} must implement materialize().")

    def resolved(self) -> Self:
        """The same array with deferred work done, which is what `implicit` returns."""
        return self

    @property
    def is_stack(self) -> bool:
        """Whether a layer along the first axis consists of the layers of its fields.

        `scan` then slices each field. Otherwise its body gets the whole array and the number of the layer, which copies
        nothing; but a gradient of such a component is accumulated whole at every step.
        """
        return False

    def plain(self) -> Self:
        """The same array, stored so that a slice of its components is a slice of the array."""
        return self

    def component_specs(self, spec: jax.sharding.PartitionSpec, mesh: Any = None) -> Any:
        """The PartitionSpec of each field, as a tree like this array, for a PartitionSpec of the array.

        With a mesh, raises a `ValueError` where the components cannot be sharded that way.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how its components are sharded.")

    def component_shardings(self, sharding: Any) -> Any:
        """The sharding of each field, as a tree like this array, for a sharding of the array."""
        if not isinstance(sharding, jax.sharding.NamedSharding):
            return jax.tree.map(lambda _: sharding, self)
        specs = self.component_specs(sharding.spec, sharding.mesh)
        return jax.tree.map(lambda _, spec: sharding.update(spec=spec), self, specs)

    def logical_spec(self) -> jax.sharding.PartitionSpec | None:
        """The PartitionSpec of the array on a mesh with explicit axes; None for a replicated one."""
        return None

    # --- pytree

    @classmethod
    @functools.cache
    def _fields(cls) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names of the fields that hold arrays, and of the static ones."""
        if not dataclasses.is_dataclass(cls):
            raise TypeError(f"{cls.__name__} must be a dataclass: put @dataclasses.dataclass on it.")
        fields = dataclasses.fields(cls)
        return (
            tuple(f.name for f in fields if not f.metadata.get(_STATIC)),
            tuple(f.name for f in fields if f.metadata.get(_STATIC)),
        )

    def _flatten(self) -> tuple[list[Any], tuple[Any, ...]]:
        components, static = self._fields()
        return [getattr(self, n) for n in components], tuple(getattr(self, n) for n in static)

    def _flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        children, static = self._flatten()
        names, _ = self._fields()
        return [(GetAttrKey(n), c) for n, c in zip(names, children, strict=True)], static

    @classmethod
    def _unflatten(cls, static: tuple[Any, ...], children: Any) -> Self:
        components, names = cls._fields()
        array = object.__new__(cls)
        array.__dict__.update(zip(components, children, strict=True))
        array.__dict__.update(zip(names, static, strict=True))
        return array

    # --- the attributes of an array

    # Not data descriptors, so that a subclass may store `shape` or `dtype` as a field.
    shape: Any = functools.cached_property(lambda self: self._dense_type.shape)
    dtype: Any = functools.cached_property(lambda self: self._dense_type.dtype)

    @functools.cached_property
    def _dense_type(self) -> jax.ShapeDtypeStruct:
        abstract = jax.tree.map(lambda component: jax.ShapeDtypeStruct(component.shape, component.dtype), self)
        return jax.eval_shape(lambda array: array.materialize(), abstract)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes stored, all components counted."""
        return sum(math.prod(component.shape) * component.dtype.itemsize for component in jax.tree.leaves(self))

    @property
    def T(self) -> Any:
        return operate(jnp.transpose, self)

    @property
    def mT(self) -> Any:
        return operate(jnp.matrix_transpose, self)

    def reshape(self, *shape: Any) -> Any:
        dims = shape[0] if len(shape) == 1 and isinstance(shape[0], Iterable) else shape
        return operate(jnp.reshape, self, shape=tuple(operator.index(n) for n in dims))

    def astype(self, dtype: Any) -> Any:
        return operate(_astype, self, dtype=np.dtype(dtype))

    def __getitem__(self, index: Any) -> Any:
        operands, template = split_indices(self.shape, index)
        return operate(get_item, self, operands, template=template)

    def __getattr__(self, name: str) -> Any:
        # Called only for names that are not found otherwise. As attributes of the class these names would be taken for
        # the defaults of fields of the same name.
        if name in _METHODS:
            return functools.partial(_call_method, self, name, None)
        if name in _ATTRIBUTES:
            return _ATTRIBUTES[name](self)
        if hasattr(type(self), name) and name != "__jax_array__":  # a property that raised AttributeError
            return object.__getattribute__(self, name)
        message = f"{type(self).__name__!r} object has no attribute {name!r}"
        if not name.startswith("_") and (name in _HOST_NAMES or hasattr(jax.Array, name)):
            message += (
                f". Each of its components has it, jax.tree.leaves(array), and so has the dense array: "
                f".materialize().{name}"
            )
        raise AttributeError(f"{message}.")

    def __dir__(self) -> Iterable[str]:
        return {*super().__dir__(), *_METHODS, *_ATTRIBUTES}

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array with no axes.")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        from ._interpret import go_dense  # the interpreter is written in terms of this class

        if copy is False:
            raise ValueError(f"{type(self).__name__} has no dense numbers to share; use copy=None.")
        return np.asarray(go_dense(self, "__array__"), dtype)

    @property
    def __jax_array__(self) -> Callable[[], Any]:
        from ._interpret import capture, is_tracing

        if is_tracing():
            return lambda: capture(self)
        if asks_for_type():  # which would tell the user to call jnp.array; the error without the attribute is better
            raise AttributeError("__jax_array__")
        return lambda: _Outside(self)

    def __bool__(self) -> bool:
        return bool(self._one_element())

    def __float__(self) -> float:
        return float(self._one_element())

    def __int__(self) -> int:
        return int(self._one_element())

    def _one_element(self) -> jax.Array:
        if self.size != 1:
            raise ValueError(f"An array of shape {self.shape} has no single value; use .any(), .all() or an index.")
        return self.materialize().reshape(())

    __add__, __radd__ = _both_sides(operator.add)
    __sub__, __rsub__ = _both_sides(operator.sub)
    __mul__, __rmul__ = _both_sides(operator.mul)
    __truediv__, __rtruediv__ = _both_sides(operator.truediv)
    __floordiv__, __rfloordiv__ = _both_sides(operator.floordiv)
    __mod__, __rmod__ = _both_sides(operator.mod)
    __divmod__, __rdivmod__ = _both_sides(divmod)
    __pow__, __rpow__ = _both_sides(operator.pow)
    __matmul__, __rmatmul__ = _both_sides(operator.matmul)
    __lshift__, __rlshift__ = _both_sides(operator.lshift)
    __rshift__, __rrshift__ = _both_sides(operator.rshift)
    __and__, __rand__ = _both_sides(operator.and_)
    __or__, __ror__ = _both_sides(operator.or_)
    __xor__, __rxor__ = _both_sides(operator.xor)
    __eq__, _ = _both_sides(operator.eq)
    __ne__, _ = _both_sides(operator.ne)
    __lt__, _ = _both_sides(operator.lt)
    __le__, _ = _both_sides(operator.le)
    __gt__, _ = _both_sides(operator.gt)
    __ge__, _ = _both_sides(operator.ge)
    __neg__ = _unary(operator.neg)
    __pos__ = _unary(operator.pos)
    __abs__ = _unary(operator.abs)
    __invert__ = _unary(operator.invert)
    del _

    def __repr__(self) -> str:
        def describe(path: Any, component: Any) -> str:
            name = jax.tree_util.keystr(path).lstrip(".")
            if not hasattr(component, "dtype"):
                return f"{name}={component}"
            return f"{name} {component.dtype}[{','.join(map(str, component.shape))}]"

        components, _ = jax.tree_util.tree_flatten_with_path(self)
        stored = ", ".join(describe(path, component) for path, component in components)
        try:
            facts = ", ".join(self._facts())
        except AttributeError:  # the components are shardings or other objects
            return f"{type(self).__name__}({stored})"
        except (TypeError, ValueError) as error:  # components that do not fit the format, or each other
            facts = str(error)
        return f"{type(self).__name__}({facts}\n  {stored})"

    def _facts(self) -> list[str]:
        """What `repr` says of the array, beside its components."""
        return [f"shape={self.shape}", f"dtype={np.dtype(self.dtype).name}", f"{self.nbytes:,} bytes"]


class _Outside:
    """What JAX gets for an implicit array outside of `implicit`.

    The operators of `jax.Array` return NotImplemented for it, so Python calls ours. A jnp function raises a TypeError
    that has its `repr`. `jnp.asarray` makes the array dense, by the policy.
    """

    def __init__(self, array: ImplicitArray):
        self._array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._array.__array__(dtype, copy)

    def __repr__(self) -> str:
        return (
            f"<{type(self._array).__name__} of shape {self._array.shape} outside of lowbit.implicit: wrap the function "
            "that calls jnp, lowbit.implicit(fn)(...), or pass .materialize() to have the array dense>"
        )

    @property
    def shape(self) -> tuple[int, ...]:
        raise TypeError(f"A jnp function got an implicit array: {self!r}.")

    dtype = ndim = shape


# --- operators


def operate(fn: Callable[..., Any], *operands: Any, **static: Any) -> Any:
    """`fn(*operands, **static)` on implicit arrays, compiled once for each kind of operands."""
    from ._register import rule_count  # rules registered later must apply

    return _compiled(fn, tuple(static.items()), rule_count())(*operands)


@functools.lru_cache(maxsize=4096)
def _compiled(fn: Callable[..., Any], static: tuple[tuple[str, Any], ...], rules: int) -> Callable[..., Any]:
    from ._interpret import implicit

    @functools.wraps(fn)
    def call(*operands: Any) -> Any:
        return fn(*operands, **dict(static))

    return jax.jit(implicit(call))


def _astype(array: jax.Array, *, dtype: np.dtype) -> jax.Array:
    return array.astype(dtype)


# --- the methods of jax.Array: arrays among the arguments are operands, the rest is static

_METHODS = frozenset(
    "all any argmax argmin argpartition argsort choose clip conj conjugate copy cumprod cumsum diagonal dot flatten max"
    " mean min prod ptp ravel repeat round searchsorted sort squeeze std sum swapaxes take trace transpose var".split()
)
_UPDATES = frozenset("add apply divide get max min mul multiply power set subtract".split())
# Attributes of concrete arrays that the class jax.Array does not declare.
_HOST_NAMES = frozenset(
    "clone format is_deleted is_ready on_device_size_in_bytes tobytes unsafe_buffer_pointer weak_type".split()
)


def _call_method(array: ImplicitArray, name: str, index: Any, *args: Any, **kwargs: Any) -> Any:
    """`array.name(...)`, or `array.at[index].name(...)` for an index split by `split_indices`."""
    if name == "transpose" and not args:
        return array.T  # which a class may do without a copy
    given, tree = jax.tree.flatten((args, kwargs), is_leaf=is_implicit)
    # Numbers are axes and lengths, except those that an update writes.
    numbers = len(args) if index is not None else 0
    is_operand = [
        isinstance(x, (jax.Array, np.ndarray, ImplicitArray)) or (i < numbers and type(x) in (int, float, complex))
        for i, x in enumerate(given)
    ]
    operands = [x for x, is_one in zip(given, is_operand, strict=True) if is_one]
    # With their types, since 1 == 1.0 == True but their results differ.
    static = tuple((OPERAND, None) if is_one else (type(x), x) for x, is_one in zip(given, is_operand, strict=True))
    at, template = index or ([], None)
    return operate(_method, array, at, operands, name=name, template=template, tree=tree, rest=static)


def _method(array: Any, at: list[Any], operands: list[Any], *, name: str, template: Any, tree: Any, rest: Any) -> Any:
    left = iter(operands)
    args, kwargs = jax.tree.unflatten(tree, [next(left) if kind is OPERAND else x for kind, x in rest])
    target = array if template is None else array.at[joined_index(at, template)]
    return getattr(target, name)(*args, **kwargs)


def _item(array: ImplicitArray, *index: Any) -> Any:
    position = np.unravel_index(index[0], array.shape) if len(index) == 1 else index
    return dense(array[tuple(position)]).item() if index else array._one_element().item()


def _devices(array: ImplicitArray) -> set[Any]:
    return set[Any]().union(*(component.devices() for component in jax.tree.leaves(array)))


def _device(array: ImplicitArray) -> Any:
    devices = _devices(array)
    return devices.pop() if len(devices) == 1 else array.sharding


_ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "at": lambda array: _At(array),
    "block_until_ready": lambda array: lambda: jax.block_until_ready(array),
    "device": _device,
    "devices": lambda array: lambda: _devices(array),
    "imag": lambda array: operate(jnp.imag, array),
    "item": lambda array: functools.partial(_item, array),
    "itemsize": lambda array: np.dtype(array.dtype).itemsize,
    "real": lambda array: operate(jnp.real, array),
    "tolist": lambda array: lambda: np.asarray(array).tolist(),
}


# --- updates


class _At:
    """`array.at`: `array.at[index].set(value)` and the other updates of `jax.Array.at`, none of which is in place."""

    def __init__(self, array: ImplicitArray):
        self._array = array

    def __getitem__(self, index: Any) -> "_AtIndex":
        return _AtIndex(self._array, split_indices(self._array.shape, index))


class _AtIndex:
    def __init__(self, array: ImplicitArray, index: Any):
        self._array, self._index = array, index

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in _UPDATES:
            raise AttributeError(f"array.at[...] has {', '.join(sorted(_UPDATES))}, and no {name!r}.")
        return functools.partial(_call_method, self._array, name, self._index)


# --- whole trees


def is_implicit(x: Any) -> bool:
    """Whether `x` is an implicit array. Used as `is_leaf` by every tree function here."""
    return isinstance(x, ImplicitArray)


def materialize(tree: Any) -> Any:
    """Make every implicit array in a pytree dense.

    >>> import jax.numpy as jnp, lowbit
    >>> params = {"w": lowbit.Array8B.quantize(jnp.ones((2, 3))), "b": jnp.zeros(3)}
    >>> lowbit.materialize(params)["w"].shape
    (2, 3)
    """
    return jax.tree.map(dense, tree, is_leaf=is_implicit)


def dense(x: Any) -> Any:
    """The dense array of an implicit array, also of a nested one; anything else unchanged."""
    while isinstance(x, ImplicitArray):
        x = x.materialize()
    return x
