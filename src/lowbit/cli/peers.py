"""The same work in other libraries, where they are installed: products y = x @ w with the weight in 4 or 8 bits and
float32 scales, and generated text.

Each product is checked against the float product of the weight that the library stores.
"""

import importlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

THREADS = os.cpu_count() or 1
BLOCK = 64
# NF4 as OpenVINO's element type defines it: the same numbers as in QLoRA.
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)

Coded = tuple[jax.Array, jax.Array, jax.Array]  # codes, scales, and the weight (K, N) that they represent


class Product(NamedTuple):
    """Calls, each on a different copy of the weight, the bytes of one copy, and the product of lowbit that is alike."""

    calls: list[Callable[[], Any]]
    nbytes: int
    like: str


class Library(NamedTuple):
    """A library: its modules of which all (or one, if `alternatives`) must be there, and how to install it."""

    name: str
    modules: tuple[str, ...]
    install: str
    alternatives: bool = False

    @property
    def installed(self) -> bool:
        found = [find_spec(name) is not None for name in self.modules]
        return any(found) if self.alternatives else all(found)


ONNXRUNTIME = Library("onnxruntime", ("onnxruntime", "onnx"), "pip install onnxruntime onnx")
OPENVINO = Library("OpenVINO", ("openvino",), "pip install openvino")
LLAMA_CPP = Library("llama.cpp", ("llama_cpp", "xllamacpp"), "pip install xllamacpp", alternatives=True)
LIBRARIES = (ONNXRUNTIME, OPENVINO, LLAMA_CPP)


def missing() -> list[str]:
    """A sentence for each library that is not installed."""
    return [f"{x.name} is not installed, and is left out: {x.install}" for x in LIBRARIES if not x.installed]


def products(w: jax.Array, x: jax.Array, total: int, note: Callable[[str], None]) -> dict[str, Product]:
    """The products of the libraries that are installed, by name.

    Copies of the weight have `total` bytes in all. `note` is called with what is left out, and why.
    """
    found: dict[str, Product] = {}
    if ONNXRUNTIME.installed:
        found |= _onnxruntime(w, np.array(x), total)
    if OPENVINO.installed:
        found |= _openvino(w, np.array(x), total, note)
    return found


def _checked(name: str, product: Product, x: np.ndarray, meant: jax.Array, bound: float) -> float:
    """The relative error of a product."""
    expected = np.asarray(jnp.matmul(x, meant, precision="highest"))
    error = float(np.linalg.norm(product.calls[0]() - expected) / np.linalg.norm(expected))
    if not error < bound:
        raise ValueError(f"{name} multiplies with a relative error of {error:.2g}, and less than {bound:.2g} is due.")
    return error


def _copies(
    make: Callable[[], Callable[[], Any]], stored: tuple[np.ndarray, np.ndarray], total: int, like: str
) -> Product:
    nbytes = sum(component.nbytes for component in stored)
    return Product([make() for _ in range(max(2, -(-total // nbytes)))], nbytes, like)


@jax.jit
def _uint4(w: jax.Array) -> Coded:
    blocks = w.T.reshape(w.shape[1], -1, BLOCK)
    scales = jnp.abs(blocks).max(-1) / 7
    codes = jnp.round(blocks / scales[..., None]) + 8
    return _pack(codes.astype(jnp.uint8)), scales, ((codes - 8) * scales[..., None]).reshape(w.T.shape).T


@jax.jit
def _nf4(w: jax.Array) -> Coded:
    levels = jnp.array(LEVELS, jnp.float32)
    blocks = w.T.reshape(w.shape[1], -1, BLOCK)
    scales = jnp.abs(blocks).max(-1)
    codes = jnp.searchsorted((levels[1:] + levels[:-1]) / 2, blocks / scales[..., None], method="compare_all")
    return _pack(codes.astype(jnp.uint8)), scales, (levels[codes] * scales[..., None]).reshape(w.T.shape).T


@jax.jit
def _int8(w: jax.Array) -> Coded:
    scales = jnp.abs(w).max(0) / 127
    codes = jnp.round(w / scales)
    return codes.astype(jnp.int8), scales, codes * scales


def _pack(codes: jax.Array) -> jax.Array:
    return codes[..., ::2] | codes[..., 1::2] << 4  # both libraries expect the first code in the low bits


def _onnxruntime(w: jax.Array, x: np.ndarray, total: int) -> dict[str, Product]:
    onnxruntime: Any = importlib.import_module("onnxruntime")
    onnx: Any = importlib.import_module("onnx")
    helper, float32 = importlib.import_module("onnx.helper"), onnx.TensorProto.FLOAT
    initializer = importlib.import_module("onnx.numpy_helper").from_array

    (k, n), m = w.shape, len(x)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = THREADS, 1
    # Threads that keep spinning after a call would take a core from whatever is timed next.
    options.add_session_config_entry("session.force_spinning_stop", "1")

    def product(name: str, like: str, coded: Coded, op: str, **attributes: int) -> Product:
        stored = np.asarray(coded[0]), np.asarray(coded[1])
        graph = helper.make_graph(
            [helper.make_node(op, ["x", "codes", "scales"], ["y"], domain="com.microsoft", **attributes)],
            "product",
            [helper.make_tensor_value_info("x", float32, [m, k])],
            [helper.make_tensor_value_info("y", float32, [m, n])],
            [initializer(stored[0], "codes"), initializer(stored[1], "scales")],
        )
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        # Not the newest file format of onnx, which a released onnxruntime may not read yet.
        model = helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()

        def copy() -> Callable[[], np.ndarray]:
            session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
            binding, y = session.io_binding(), np.empty((m, n), np.float32)
            binding.bind_input("x", "cpu", 0, np.float32, x.shape, x.ctypes.data)
            binding.bind_output("y", "cpu", 0, np.float32, y.shape, y.ctypes.data)

            def run(_x: np.ndarray = x) -> np.ndarray:  # the binding has only x's address: this keeps it alive
                session.run_with_iobinding(binding)
                return y

            return run

        made = _copies(copy, stored, total, like)
        _checked(name, made, x, coded[2], bound=5e-2)
        return made

    nbits = {"K": k, "N": n, "bits": 4, "block_size": BLOCK, "accuracy_level": 4}  # 4: activations in int8
    # DynamicQuantizeLinear + MatMulInteger + Cast + Mul took as long as DynamicQuantizeMatMul, which is one node.
    return {
        "onnxruntime 4-bit int8": product("onnxruntime 4-bit", "q4 fast", _uint4(w), "MatMulNBits", **nbits),
        "onnxruntime int8 int8": product("onnxruntime int8", "int8 fast", _int8(w), "DynamicQuantizeMatMul"),
    }


def _openvino(w: jax.Array, x: np.ndarray, total: int, note: Callable[[str], None]) -> dict[str, Product]:
    modules: dict[str, Any] = sys.modules
    # Importing OpenVINO would report its use over the network, from a fork, which is unsafe with JAX's threads.
    modules.setdefault("openvino_telemetry", None)
    ov: Any = importlib.import_module("openvino")
    op: Any = importlib.import_module("openvino.opset13")

    found: dict[str, Product] = {}
    k, n = w.shape
    core = ov.Core()
    for name, coded, dynamic in (("nf4", _nf4(w), 0), ("u4", _uint4(w), BLOCK)):
        stored = np.asarray(coded[0]), np.asarray(coded[1])
        kind = getattr(ov.Type, name)
        codes = ov.Tensor(stored[0].reshape(-1), ov.Shape([n, k // BLOCK, BLOCK]), kind)
        weight = op.convert(op.constant(codes), np.float32)
        if name == "u4":
            middle = ov.Tensor(np.array([8], np.uint8), ov.Shape([1, 1, 1]), kind)
            weight = op.subtract(weight, op.convert(op.constant(middle), np.float32))
        weight = op.multiply(weight, op.constant(stored[1][..., None]))
        rows = op.parameter(x.shape, np.float32)
        model = ov.Model([op.matmul(rows, op.reshape(weight, [n, k], False), False, True)], [rows])
        settings = {
            "INFERENCE_PRECISION_HINT": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": dynamic,
            "INFERENCE_NUM_THREADS": THREADS,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "ENABLE_CPU_PINNING": False,  # the others' threads are not pinned either
        }

        def copy(model: Any = model, settings: Any = settings) -> Callable[[], np.ndarray]:
            request = core.compile_model(model, "CPU", settings).create_infer_request()
            request.set_input_tensor(ov.Tensor(x, shared_memory=True))
            y = request.get_output_tensor().data

            def run() -> np.ndarray:
                request.infer()
                return y

            return run

        nodes = core.compile_model(model, "CPU", settings).get_runtime_model().get_ops()
        if name not in {node.get_rt_info()["runtimePrecision"].astype(str) for node in nodes}:
            note(f"OpenVINO decodes {name} to float before the first call on this processor, and is left out")
            continue
        made = _copies(copy, stored, total, "")
        error = _checked(f"OpenVINO {name}", made, x, coded[2], bound=5e-2 if dynamic else 1e-3)
        # The setting only allows int8 activations: with plain AVX2 they stay float32. The error says which it was.
        coarse = error > 1e-4
        like = f"{'q4' if name == 'u4' else name} {'fast' if coarse else 'exact'}"
        found[f"OpenVINO {name} {'int8' if coarse else 'exact'}"] = made._replace(like=like)
    return found


# --- text


def llama_cpp(path: Path, prompt: Sequence[int], tokens: int) -> Callable[[], tuple[float, float]]:
    """A run of llama.cpp: the seconds that it takes to read a prompt, and to generate after it."""
    return (_by_bindings if find_spec("llama_cpp") else _by_server)(path, list(prompt), tokens)


def _by_bindings(path: Path, prompt: list[int], tokens: int) -> Callable[[], tuple[float, float]]:
    """By the package llama-cpp-python."""
    bindings: Any = importlib.import_module("llama_cpp")
    threads = {"n_threads": THREADS, "n_threads_batch": THREADS}
    model = bindings.Llama(str(path), n_ctx=512, n_batch=512, verbose=False, **threads)

    def run() -> tuple[float, float]:
        start = time.perf_counter()
        model.reset()
        model.eval(prompt)
        read = time.perf_counter()
        for _ in range(tokens):
            last = model._ctx.get_logits_ith(-1)
            model.eval([int(np.argmax(np.ctypeslib.as_array(last, shape=(model.n_vocab(),))))])
        return read - start, time.perf_counter() - read

    return run


def _by_server(path: Path, prompt: list[int], tokens: int) -> Callable[[], tuple[float, float]]:
    """By the package xllamacpp, which times itself."""
    package: Any = importlib.import_module("xllamacpp")
    params = package.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.n_gpu_layers, params.verbosity = 512, 1, 0, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
    server = package.Server(params)
    # The first token comes from the prompt.
    request = {"prompt": prompt, "n_predict": tokens + 1, "cache_prompt": False, "temperature": 0, "ignore_eos": True}

    def run() -> tuple[float, float]:
        took = server.handle_completions(request)["timings"]
        return took["prompt_ms"] / 1e3, took["predicted_ms"] / 1e3

    return run
