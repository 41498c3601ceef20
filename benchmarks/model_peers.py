"""SmolLM2 as other libraries quantize it: llama.cpp with an importance matrix, and qwix with GPTQ."""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import jax.numpy as jnp
import numpy as np
from formats import quantizer
from gguf_files import FALLBACK

# llama.cpp's mixtures of types (llama-quant.cpp): that of most tensors, and of those that get another.
MIXES = ("Q2_K", "Q3_K_M", "IQ4_XS", "Q4_K_S", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0")
GROUP = 32  # of qwix


def models(model: Any) -> dict[str, Callable[[], Any]]:
    found = {}
    if find_spec("xllamacpp") and find_spec("gguf"):
        found |= {f"llama.cpp {mix}": lambda mix=mix: _llama_cpp(model, mix) for mix in MIXES}
    else:
        print("without llama.cpp: pip install --no-deps xllamacpp gguf", file=sys.stderr)
    if find_spec("qwix"):
        found["qwix GPTQ int4"] = lambda: _qwix(model)
    else:
        print("without qwix: pip install --no-deps qwix", file=sys.stderr)
    return found


# --- llama.cpp


def type_of(mix: str, name: str, layer: int, layers: int, width: int) -> str:
    """The type of a tensor in a mixture: what llama.cpp chooses with an importance matrix for three heads to a key."""
    main = mix.removesuffix("_S").removesuffix("_M")
    more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    if name == "embed":  # which is the head too
        return "Q8_0" if width % 256 or mix == "Q8_0" else "Q6_K"
    special = {
        ("Q4_K_M", "v"): "Q6_K" if more else main,
        ("Q4_K_M", "down"): "Q6_K" if more else main,
        ("Q4_K_S", "v"): "Q5_K" if layer < 4 else main,
        ("Q4_K_S", "down"): "Q5_K" if layer < layers // 8 else main,
        ("Q5_K_M", "v"): "Q6_K" if more else main,
        ("Q5_K_M", "down"): "Q6_K" if more else main,
        ("Q3_K_M", "v"): "Q5_K" if layer < 2 else "Q4_K",
        ("Q3_K_M", "down"): "Q5_K" if layer < layers // 16 else "Q4_K",
        ("Q3_K_M", "o"): "Q4_K",
        ("Q2_K", "v"): "Q3_K",
        ("Q2_K", "down"): "Q3_K",
        ("Q2_K", "o"): "Q3_K",
    }
    chosen = special.get((mix, name), main)
    return FALLBACK[chosen] if width % 256 and chosen in FALLBACK else chosen


def _llama_cpp(model: Any, mix: str) -> Any:
    """Each matrix in blocks by llama.cpp's own code, and read back."""
    import gguf

    quantized, statistics = quantizer(), model.statistics(False)
    assert quantized is not None
    sizes = []

    def coded(w: np.ndarray, type: str, importance: np.ndarray) -> np.ndarray:
        """A matrix (out, in), read back."""
        kind = gguf.GGMLQuantizationType[type]
        blocks = quantized(w, kind, importance)
        sizes.append(blocks.nbytes)
        return gguf.quants.dequantize(blocks, kind)

    dense, layers = model.dense.params, {}
    for name, stack in dense["layers"].items():
        if stack.ndim == 2:  # norms
            sizes.append(stack.nbytes)
            layers[name] = stack
            continue
        diag = statistics[f"layers/{name}"].diag
        layers[name] = jnp.stack(
            [
                coded(np.asarray(w).T, type_of(mix, name, i, len(stack), len(w)), diag[i]).T
                for i, w in enumerate(np.asarray(stack))
            ]
        )
    table = np.asarray(dense["embed"])
    embed = coded(table, type_of(mix, "embed", 0, 1, table.shape[1]), statistics["embed"].diag)
    sizes.append(dense["norm"].nbytes)
    return dense | {"embed": jnp.asarray(embed), "layers": layers}, sum(sizes)


# --- qwix


def _qwix(model: Any) -> Any:
    """GPTQ of every linear and of the tied table: int4 with a float32 scale for each group of 32 inputs.

    Weights with the same inputs are rounded together, which changes nothing: its rows are independent.
    """
    qarray, gptq_core = (import_module(f"qwix.{name}") for name in ("_src.core.qarray", "contrib.gptq_core"))
    statistics, dense = model.statistics(False), model.dense.params
    how = qarray.HowToQuantize(qtype=jnp.int4, channelwise_axes=(0,), tiled_axes={1: GROUP})

    def rounded(w: Any, h: Any) -> np.ndarray:
        """A matrix (out, in), read back."""
        return np.asarray(qarray.dequantize(gptq_core.quantize_weight(jnp.asarray(w), jnp.asarray(h), how)[0]))

    layers = {name: np.array(w) for name, w in dense["layers"].items()}
    for i in range(len(layers["attn_norm"])):
        for names in (("q", "k", "v"), ("o",), ("gate", "up"), ("down",)):
            h = statistics[f"layers/{names[0]}"].hessian[i]
            found = rounded(np.concatenate([layers[name][i].T for name in names]), h).T
            parts = np.split(found, np.cumsum([layers[name].shape[-1] for name in names])[:-1], axis=1)
            for name, part in zip(names, parts, strict=True):
                layers[name][i] = part
    embed = rounded(dense["embed"], statistics["embed"].hessian)
    matrices = [embed, *(w for w in layers.values() if w.ndim == 3)]
    norms = [dense["norm"], layers["attn_norm"], layers["mlp_norm"]]
    size = sum(w.size // 2 + 4 * w.size // GROUP for w in matrices) + sum(w.nbytes for w in norms)
    return dense | {"embed": jnp.asarray(embed), "layers": {name: jnp.asarray(w) for name, w in layers.items()}}, size
