"""SmolLM2 as other libraries quantize it: llama.cpp with an importance matrix, and qwix with GPTQ."""

import contextlib
import ctypes
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowbit.demo.language_model import LanguageModel
from lowbit.demo.llama import GGUF
from lowbit.demo.model_file import demo_model_path
from lowbit.io import GGUFFile, write_gguf

# llama.cpp's mixtures of types, each with its number in llama.h.
MIXES = {"Q2_K": 10, "Q3_K_M": 12, "IQ4_XS": 30, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18, "Q8_0": 7}
GROUP = 32  # of qwix
ROWS = 1024  # that qwix rounds at a time


def models(model: Any) -> dict[str, Callable[[], Any]]:
    found = {}
    if model.args.llama_cpp:
        found |= {f"llama.cpp {mix}": lambda mix=mix: _llama_cpp(model, mix) for mix in MIXES}
    else:
        print("without llama.cpp: pass --llama-cpp FOLDER", file=sys.stderr)
    if find_spec("qwix"):
        found["qwix GPTQ int4"] = lambda: _qwix(model)
    else:
        print("without qwix: pip install --no-deps qwix", file=sys.stderr)
    return found


# --- llama.cpp


class Importance(ctypes.Structure):
    """llama_model_imatrix_data of llama.h."""

    _fields_ = (("name", ctypes.c_char_p), ("data", ctypes.c_void_p), ("size", ctypes.c_size_t))


class Options(ctypes.Structure):
    """llama_model_quantize_params of llama.h, up to the importance matrix, and room for what follows."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("threads", "mixture", "type_of_output", "type_of_embedding")),
        *((name, ctypes.c_bool) for name in ("requantize", "with_output", "only_copy", "pure", "split", "dry_run")),
        ("importance", ctypes.POINTER(Importance)),
        ("rest", ctypes.c_uint64 * 16),
    )


def _llama_cpp(model: Any, mix: str) -> Any:
    """The file that llama.cpp makes from the model in float32 with an importance matrix, decoded."""
    with tempfile.TemporaryDirectory() as folder:
        source, path = Path(folder) / "float32.gguf", Path(folder) / "quantized.gguf"
        stored = GGUFFile(demo_model_path())
        dense = {name: stored.dense(name).astype(np.float32) for name in stored}
        write_gguf(source, dense, stored.fields | {"general.file_type": 0})
        library = _library(model.args.llama_cpp)
        with _importance(model) as importance:
            options = library.llama_model_quantize_default_params()
            if (options.mixture, options.with_output, options.dry_run) != (MIXES["Q8_0"], True, False):
                raise RuntimeError("The options of this llama.cpp are laid out in another way than in `Options`.")
            options.threads, options.mixture, options.importance = 1, MIXES[mix], importance
            if library.llama_model_quantize(bytes(source), bytes(path), ctypes.byref(options)):
                raise RuntimeError(f"llama.cpp did not write {mix}.")
        made = GGUFFile(path)
        for kind in sorted({made.type(name) for name in made}):
            print(mix, kind, sum(made.type(name) == kind for name in made), file=sys.stderr)
        return LanguageModel.from_gguf(path).params, sum(made.nbytes(name) for name in made)


def _library(folder: Path) -> Any:
    """libllama in a folder, with the libraries that it needs."""
    (path,) = folder.glob("libllama.*so*")
    for name in ("libggml-base*.so", "libggml.*so"):
        for needed in folder.glob(name):
            ctypes.CDLL(str(needed), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(path))
    library.llama_backend_init()
    library.llama_model_quantize_default_params.restype = Options
    return library


@contextlib.contextmanager
def _importance(model: Any) -> Iterator[Any]:
    """The mean squares of the inputs of each matrix, as llama.cpp takes them; a name of NULL ends the list."""
    found = model.statistics(False)
    means = {GGUF.embed: found["embed"].diag / found["embed"].count}
    for name, own in GGUF.names.items():
        if (path := f"layers/{name}") in found:
            each = zip(found[path].diag, found[path].count, strict=True)
            means |= {GGUF.layer.format(i, own): diag / count for i, (diag, count) in enumerate(each)}
    kept = {name: np.ascontiguousarray(x, np.float32) for name, x in means.items()}
    yield (Importance * (len(kept) + 1))(
        *(Importance(name.encode(), x.ctypes.data, x.size) for name, x in kept.items())
    )


# --- qwix


def _qwix(model: Any) -> Any:
    """GPTQ of every linear and of the tied table: int4 with a float32 scale for each group of 32 inputs.

    Its loop over inputs is compiled as a whole, which gives the same codes: its steps alone take 15 s for 64 inputs.
    Weights with the same inputs are rounded together, and as many rows at a time, so that two programs do for all
    weights (2 and 6 minutes to compile, the second in 9 GB). That changes nothing either: its rows are independent.
    """
    qarray, gptq_core = (import_module(f"qwix.{name}") for name in ("_src.core.qarray", "contrib.gptq_core"))
    statistics, dense = model.statistics(False), model.dense.params
    how = qarray.HowToQuantize(qtype=jnp.int4, channelwise_axes=(0,), tiled_axes={1: GROUP})

    @jax.jit
    def read_back(w: jax.Array, h: jax.Array) -> jax.Array:
        return qarray.dequantize(gptq_core.quantize_weight(w, h, how)[0])

    def rounded(w: Any, h: Any) -> np.ndarray:
        """A matrix (out, in), read back. The last rows are filled up with others."""
        filled = np.resize(w, (-(-len(w) // ROWS) * ROWS, w.shape[1])).reshape(-1, ROWS, w.shape[1])
        return np.concatenate([np.asarray(read_back(part, h)) for part in filled])[: len(w)]

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
