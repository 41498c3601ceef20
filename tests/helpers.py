"""What the tests share: every format in every layout, and comparisons that assert."""

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import lowbit
from lowbit import FORMATS, QuantizedArray
from lowbit.config import default_block_size

# Flags of XLA for programs that run once: optimizing them takes longer than it saves. Most of the time goes
# into the kernels of a program, and the pass that is disabled splits every long sum and maximum into two.
QUICK_COMPILE = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_disable_hlo_passes=tree_reduction_rewriter"
)
# JAX 0.7 can still generate kernels without MLIR, in less than half of the time.
if jax.__version_info__ < (0, 8):
    QUICK_COMPILE += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"

K, N, ROWS, LAYERS = 64, 96, 8, 3


@dataclasses.dataclass(frozen=True)
class Layout:
    """A format with its scales along one of the axes, and its options."""

    format: str
    axis: int
    block_size: int | None
    options: tuple[tuple[str, Any], ...] = ()

    def quantize(self, array: Any, **options: Any) -> QuantizedArray:
        if isinstance(array, jax.Array) and not options:
            return _quantize(self, array)
        return self.as_called(array, **options)

    def as_called(self, array: Any, **options: Any) -> QuantizedArray:
        """As a user calls it: a program for each step, of which coded scales have about twenty."""
        block = {} if self.block_size is None else {"block_size": self.block_size}
        return FORMATS[self.format].quantize(array, axis=self.axis, **block, **dict(self.options), **options)

    @property
    def spans(self) -> int | None:
        """How many elements along the axis share a scale; None for all."""
        return self.block_size or default_block_size(FORMATS[self.format])

    def __str__(self) -> str:
        block = f"-block{self.block_size}" if self.block_size else ""
        return f"{self.format}-axis{self.axis}{block}" + "".join(f"-{name}={value}" for name, value in self.options)


# In one program.
_quantize = jax.jit(Layout.as_called, static_argnums=0)

AFFINE = (("offset", True), ("scale_dtype", "float16"))


def layouts() -> list[Layout]:
    """Two layouts of every format."""
    return _every_format((-2, None), (-1, 16))


def more_layouts() -> list[Layout]:
    """Two more layouts of every format, for tests that depend on the axis and the blocks of the scales."""
    return _every_format((-2, 32), (-1, None))


def _every_format(*ways: tuple[int, int | None]) -> list[Layout]:
    rows = [*((name, ()) for name in FORMATS), ("int4", AFFINE)]
    return [Layout(name, axis, block, options) for name, options in rows for axis, block in ways]


# No shape is that of an activation.
SHAPES = {"w": (K, N), "square": (K, K), "stack": (LAYERS, K, K), "heads": (K, 4, 32)}


class Weights(Mapping[str, QuantizedArray]):
    """Quantized arrays for the features, each made when it is first asked for."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.made: dict[str, QuantizedArray] = {}

    def __getitem__(self, name: str) -> QuantizedArray:
        if name not in self.made:
            size = 1 / 8 if name in ("square", "stack") else 1.0  # activations pass through these several times
            dense = gaussian([*SHAPES].index(name), SHAPES[name]) * np.float32(size)
            self.made[name] = self.layout.quantize(dense)
        return self.made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(SHAPES)

    def __len__(self) -> int:
        return len(SHAPES)


@functools.cache
def weights(layout: Layout) -> Weights:
    return Weights(layout)


def gaussian(seed: int, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
    """Random numbers of NumPy: those of JAX compile a program for each shape."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


def activations() -> jax.Array:
    return gaussian(2, (ROWS, K))


def assert_close(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    """Assert equal structure, shape and dtype, and values within `tolerance` of the largest."""
    got, want = lowbit.materialize(got), lowbit.materialize(want)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.shape == w.shape, (g.shape, w.shape)
        assert g.dtype == w.dtype, (g.dtype, w.dtype)
        g, w = (np.asarray(a, np.float64 if jnp.issubdtype(a.dtype, jnp.floating) else a.dtype) for a in (g, w))
        if not np.issubdtype(w.dtype, np.floating):
            np.testing.assert_array_equal(g, w)
        elif w.size:
            assert np.array_equal(np.isnan(g), np.isnan(w))
            scale = max(np.nanmax(np.abs(w), initial=0), 1e-30)
            error = np.nanmax(np.abs(g - w), initial=0) / scale
            assert error <= tolerance, f"relative error {error}"


def together(*programs: Any) -> Any:
    """Several programs compiled as one, which takes less time than each alone; their results are dequantized."""
    return jax.jit(lambda *operands: [lowbit.materialize(lowbit.implicit(program)(*operands)) for program in programs])


def assert_same_bits(a: QuantizedArray, b: QuantizedArray) -> None:
    """Assert that two arrays have the same stored bits."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def collectives(text: str) -> Counter[str]:
    """The collectives of a compiled program, with the types they move."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf"= \(?(\w+\[[\d,]*\])[^=\n]*? ({kinds})(?:-start)?\(", text)
    return Counter(f"{kind} {moved}" for moved, kind in found)


def elements(kind: str) -> int:
    """How many elements a collective moves, for instance 512 for "all-gather f32[2,256]"."""
    return math.prod(map(int, kind.split("[")[1].rstrip("]").split(",")))
