"""Every operation by decoding: correct on every platform, and what each kernel is tested against."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from lowbit.formats.blocks import WHOLE, span_of, spread
from lowbit.formats.quantized import QuantizedArray

from .groups import by_groups, ragged
from .product import Product


def matmul(product: Product) -> jax.Array:
    """Multiply and sum in float32 (float64 for a float64 result), and round once; integers in their own dtype."""
    if product.sizes is not None:
        return _grouped(product)
    x, w, dtype = product.x, product.w, product.dtype
    wide = dtype if jnp.issubdtype(dtype, jnp.integer) else jnp.promote_types(dtype, jnp.float32)
    batch = tuple(range(w.ndim - 2))
    dims = (((x.ndim - 1,), (w.ndim + product.contract,)), (batch, batch))
    y = lax.dot_general(
        x.astype(wide),
        w.decode().astype(wide),
        dims,
        precision=product.precision,
        preferred_element_type=wide,
        out_sharding=product.out_sharding,
    )
    return y.astype(dtype)


def _grouped(product: Product) -> jax.Array:
    """Each group by its own matrix, which is decoded for each tile of rows that has some of the group."""
    w, dtype = product.w.resolved(), product.dtype
    if product.out_sharding is not None:  # on explicit axes, where JAX knows no type for the parts of a tile
        wide = jnp.promote_types(dtype, jnp.float32)
        dense = w.decode().astype(wide)
        return ragged(product.x.astype(wide), dense, product, out_sharding=product.out_sharding).astype(dtype)
    w = w.map_components(lambda component, _: component.reshape(-1, *component.shape[-2:]))

    def multiply(x: jax.Array, i: jax.Array) -> jax.Array:
        return matmul(replace(product, x=x, w=w.replace(index=i), sizes=None))

    return by_groups(multiply, product.x.reshape(-1, product.k), product.n, dtype, product).reshape(product.shape)


def take(w: QuantizedArray, rows: jax.Array) -> jax.Array:
    """Decode rows of a matrix as stored, for row numbers of shape (..., 1) that are all in range."""
    spans = w.component_spans()
    codes = (_chosen(getattr(w, name), spans[name], rows) for name in w.packing)
    values = w.unpacked_levels(*codes, length=w.stored_shape[-1])
    return w.scaled(values, lambda scales: of_rows(w, scales, rows)).astype(w.dtype)


def of_rows(w: QuantizedArray, scales: jax.Array, rows: jax.Array) -> jax.Array:
    """The scale (or offset) of each element of these rows."""
    return spread(_chosen(scales, w.spans, rows), w.spans[-1:], w.stored_shape[-1:])


def _chosen(component: jax.Array, spans: tuple[int, ...], rows: jax.Array) -> jax.Array:
    span = span_of(spans, -2)
    return component[0] if span == WHOLE else jnp.take(component, rows[..., 0] // span, axis=0, mode="clip")


def squares(w: QuantizedArray, array: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sums of squares of each row's error and of the row itself, in float32."""
    array = array.astype(jnp.float32)
    return jnp.sum((w.decode() - array) ** 2, -1), jnp.sum(array**2, -1)
