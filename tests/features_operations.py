"""Features that are single operations: products, lookups, slices and elementwise functions."""

import jax
import jax.numpy as jnp
from features_registry import fused, layout_matters, may_go_dense
from helpers import LAYERS, K, N
from jax import lax

# --- products


@layout_matters
@fused
def matmul_left(x, p):
    return x @ p["w"]


@layout_matters
@fused
def matmul_right(x, p):
    return p["w"].T @ x.T


@layout_matters
@fused
def square_transposed(x, p):
    return x @ p["square"].T


@layout_matters
@fused
def vector_times_matrix(x, p):
    return x[0] @ p["w"], p["w"] @ jnp.arange(float(N))


@layout_matters
@fused
def einsum(x, p):
    return jnp.einsum("bk,kn->bn", x, p["w"]), jnp.einsum("bd,vd->bv", x, p["square"])


@layout_matters
@fused
def einsum_weight_first(x, p):
    return jnp.einsum("kn,bk->nb", p["w"], x)


@layout_matters
@fused
def einsum_heads(x, p):
    return jnp.einsum("bd,dhk->bhk", x, p["heads"]), jnp.einsum("bd,dhk->hbk", x, p["heads"])


@layout_matters
@fused
def einsum_batched(x, p):
    xs = jnp.stack([x] * LAYERS)
    return jnp.einsum("ebk,ekn->ebn", xs, p["stack"]), jnp.einsum("bk,ekn->ebn", x, p["stack"])


@layout_matters
@fused
def einsum_batch_in_the_middle(x, p):
    xs = jnp.stack([x] * LAYERS, axis=1)
    return jnp.einsum("bek,ekn->ben", xs, p["stack"])


@layout_matters
@fused
def tensordot_two_axes(x, p):
    y = jnp.ones((5, 4, 32))
    return jnp.tensordot(y, p["heads"], [[1, 2], [1, 2]])


@layout_matters
@fused
def batched_weight(x, p):
    return x @ p["stack"]


@layout_matters
@fused
def preferred_element_type(x, p):
    return lax.dot(x.astype(jnp.bfloat16), p["w"].astype(jnp.bfloat16), preferred_element_type=jnp.float32)


@layout_matters
@fused
def precision(x, p):
    return jnp.dot(x, p["w"], precision=lax.Precision.HIGHEST)


@layout_matters
@fused
def one_hot_times_weight(x, p):
    return jax.nn.one_hot(jnp.array([1, 5, 63]), K) @ p["w"]


@layout_matters
@fused
def tied_head(x, p):
    embedded = jnp.take(p["square"], jnp.array([3, 9, 20]), axis=0)
    return embedded @ p["square"].T


@layout_matters
@may_go_dense
def quantized_times_quantized(x, p):
    return p["square"] @ p["w"]


@layout_matters
@may_go_dense
def attention(x, p):
    q = (x @ p["square"]).reshape(1, 8, 2, 32)
    return jax.nn.dot_product_attention(q, q, p["w"][:8, :64].reshape(1, 8, 2, 32))


# --- lookups and structural operations


@layout_matters
@fused
def embedding(x, p):
    ids = jnp.array([[0, 5], [63, 2]])
    return p["w"][ids], jnp.take(p["w"], ids, axis=0)


@layout_matters
@fused
def embedding_out_of_bounds(x, p):
    ids = jnp.array([0, 1000, -1])
    return (
        jnp.take(p["w"], ids, axis=0),
        jnp.take(p["w"], ids, axis=0, mode="clip"),
        jnp.take(p["w"], ids, axis=0, mode="fill", fill_value=7.0),
    )


@layout_matters
@may_go_dense
def columns_by_index(x, p):
    ids = jnp.array([0, 5])
    return p["w"][:, ids], jnp.take(p["w"].T, ids, axis=0), p["w"].T[:, ids], p["stack"][:, ids], p["w"][ids, ids]


@layout_matters
@may_go_dense
def take_along_axis(x, p):
    return jnp.take_along_axis(p["w"], jnp.zeros((K, 2), int), axis=1)


@layout_matters
@may_go_dense
def slices(x, p):
    w = p["w"]
    return w[32:64], w[:, 32:64], w[3], w[:, 3], w[..., 0:33], w[::2], w[:, ::3], w[None], w[-1, 5], w[5:7]


@layout_matters
@may_go_dense
def dynamic_slices(x, p):
    i = jnp.argmax(x[0]) * 0 + 5
    return lax.dynamic_slice(p["w"], (i, 0), (2, N)), p["w"][i], p["stack"][i - 4], p["w"][:, i]


@layout_matters
@may_go_dense
def concatenated(x, p):
    return jnp.concatenate([p["w"], p["w"]]), jnp.concatenate([p["w"], p["w"]], axis=1), jnp.stack([p["w"], p["w"]])


@layout_matters
@may_go_dense
def at_set(x, p):
    return p["w"].at[0].set(1.0)


@layout_matters
@may_go_dense
def reshaped(x, p):
    return p["w"].reshape(4, 16, N), p["w"].reshape(-1), p["heads"].reshape(K, -1), p["w"].T.reshape(2, 48, K)


@layout_matters
@may_go_dense
def permuted(x, p):
    return jnp.transpose(p["heads"], (2, 0, 1)), jnp.swapaxes(p["stack"], 0, 2), p["stack"].mT, p["w"].T.T


# --- operations that go dense


@may_go_dense
def arithmetic(x, p):
    w = p["w"]
    return w + 1, 2 * w, w / 3, w - w, -w, w**2, abs(w), w // 2, w % 2, w + jnp.ones(N)


@may_go_dense
def comparisons(x, p):
    w = p["w"]
    return w > 0, w == w, w < jnp.ones((K, 1)), jnp.where(w > 0, w, 0), jnp.maximum(w, 0.1)


@may_go_dense
def reductions(x, p):
    w = p["w"]
    return w.sum(), w.max(0), w.mean(1), jnp.linalg.norm(w), w.argmax(), w.std(), jnp.cumsum(w, 0)


@may_go_dense
def functions(x, p):
    w = p["w"]
    return jnp.sort(w), jax.nn.softmax(w), jnp.exp(w), jnp.sqrt(abs(w)), jnp.log(abs(w) + 1), jax.nn.relu(w)


@may_go_dense
def casts(x, p):
    w = p["w"]
    return w.astype(jnp.bfloat16), w.astype(jnp.int32), w.astype(bool), w.astype(jnp.float16).astype(jnp.float32) * 0


@may_go_dense
def convolution(x, p):
    return lax.conv(jnp.ones((1, 4, 9, 9)), p["heads"][:6, :4, :4].reshape(6, 4, 2, 2), (1, 1), "SAME")


@may_go_dense
def singular_values(x, p):
    return jnp.linalg.svd(p["square"], compute_uv=False)
