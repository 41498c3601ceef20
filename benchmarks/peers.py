"""The same product in other libraries: y = x @ w, with the weight in 4 or 8 bits and float32 scales.

Each is checked against the float product of the weight that it stores. Missing libraries are listed on stderr.
"""

import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

THREADS = 2
BLOCK = 64
# NF4 as OpenVINO's element type defines it: the same numbers as in QLoRA.
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)

Product = tuple[list[Callable[[], Any]], int]
Coded = tuple[jax.Array, jax.Array, jax.Array]  # codes, scales, and the weight (K, N) that they represent


def products(w: jax.Array, x: jax.Array, total: int) -> dict[str, Product]:
    """Name -> calls, each on a different copy of the weight, `total` bytes in all; and the bytes of one copy."""
    found: dict[str, Product] = {}
    for needs, make in ((("onnx", "onnxruntime"), _onnxruntime), (("openvino",), _openvino)):
        if absent := [name for name in needs if not find_spec(name)]:
            _say(f"peers: without {make.__name__[1:]}, for lack of {', '.join(absent)}")
        else:
            found |= make(w, np.array(x), total)
    return found


@cache  # each text once
def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _measured(name: str, calls: Product, x: np.ndarray, meant: jax.Array, bound: float) -> float:
    expected = np.asarray(jnp.matmul(x, meant, precision="highest"))
    error = float(np.linalg.norm(calls[0][0]() - expected) / np.linalg.norm(expected))
    if not error < bound:
        raise AssertionError(f"{name}: relative error {error:.2g}, expected less than {bound:.2g}")
    return error


def _copies(make: Callable[[], Callable[[], Any]], stored: tuple[np.ndarray, np.ndarray], total: int) -> Product:
    nbytes = sum(component.nbytes for component in stored)
    return [make() for _ in range(max(2, -(-total // nbytes)))], nbytes


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
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    (k, n), m = w.shape, len(x)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = THREADS, 1
    # Threads that keep spinning after a call would take a core from whatever is timed next.
    options.add_session_config_entry("session.force_spinning_stop", "1")

    def product(name: str, coded: Coded, op: str, **attributes: int) -> Product:
        stored = np.asarray(coded[0]), np.asarray(coded[1])
        graph = helper.make_graph(
            [helper.make_node(op, ["x", "codes", "scales"], ["y"], domain="com.microsoft", **attributes)],
            "product",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [m, k])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [m, n])],
            [numpy_helper.from_array(stored[0], "codes"), numpy_helper.from_array(stored[1], "scales")],
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

        calls = _copies(copy, stored, total)
        _measured(name, calls, x, coded[2], bound=5e-2)
        return calls

    nbits = {"K": k, "N": n, "bits": 4, "block_size": BLOCK, "accuracy_level": 4}  # 4: activations in int8
    # DynamicQuantizeLinear + MatMulInteger + Cast + Mul took as long as DynamicQuantizeMatMul, which is one node.
    return {
        "onnxruntime 4-bit int8": product("onnxruntime 4-bit", _uint4(w), "MatMulNBits", **nbits),
        "onnxruntime int8 int8": product("onnxruntime int8", _int8(w), "DynamicQuantizeMatMul"),
    }


def _openvino(w: jax.Array, x: np.ndarray, total: int) -> dict[str, Product]:
    # Importing OpenVINO would report its use over the network, from a fork, which is unsafe with JAX's threads.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino as ov
    from openvino import opset13 as op

    (k, n), found = w.shape, {}
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
            _say(f"peers: without OpenVINO {name}, which is decoded to float before the first call on this processor")
            continue
        calls = _copies(copy, stored, total)
        error = _measured(f"OpenVINO {name}", calls, x, coded[2], bound=5e-2 if dynamic else 1e-3)
        # The setting only allows int8 activations: with plain AVX2 they stay float32. The error says which it was.
        found[f"OpenVINO {name} {'int8' if error > 1e-4 else 'exact'}"] = calls
    return found
