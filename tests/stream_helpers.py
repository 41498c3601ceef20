"""What the tests of streaming share: tensors that are split in every way, and the file that they make in memory."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import QUICK_COMPILE
from tiers import MECHANISMS

import lowbit
from lowbit import QuantizationConfig, Rule
from lowbit.io import _convert as converting
from lowbit.io import open_tensors, save
from lowbit.io.streaming import _staging

HERE = Path(__file__).parent
ONE_DEVICE = {**os.environ, "XLA_FLAGS": QUICK_COMPILE}  # without the virtual devices of the tests
STAGING = [".lowbit-out.journal", ".lowbit-out.part"]


BOTH = QuantizationConfig("int8", axis=(-2, -1))
# Every way to split into chunks: by rows, by rows of blocks, by columns, by layers, within a row, or not at all. Some
# tensors have short last blocks or bytes.
CASES: dict[str, tuple[tuple[int, ...], Any, Any]] = {
    **{f"{format}.weight": ((40, 192), np.float32, format) for format in MECHANISMS},
    **{f"{format}.kernel": ((192, 40), ml_dtypes.bfloat16, format) for format in MECHANISMS},
    "affine.kernel": ((192, 40), np.float32, QuantizationConfig("int4", offset=True, scale_dtype="float16")),
    "square.weight": ((70, 150), np.float32, QuantizationConfig("fp8", axis=(-2, -1), block_size=32)),
    "layers.weight": ((3, 30, 64), np.float32, QuantizationConfig("int8", axis=-1)),
    "ragged.weight": ((70, 33), np.float32, "nf4"),
    "long.weight": ((2, 5000), np.float16, "nf4"),
    "double.weight": ((3, 30, 64), np.float32, QuantizationConfig("nf4", axis=-1, double_quant=True)),
    "blocks.kernel": ((100, 50), np.float32, QuantizationConfig("int8", block_size=32)),
    "both.weight": ((40, 192), np.float32, BOTH),
    "stack.kernel": ((3, 80, 60), np.float16, QuantizationConfig("int8", axis=-2)),
    "mean.weight": ((40, 192), np.float32, QuantizationConfig("binary", axis=(-2, -1))),
    "norm": ((4000,), np.float32, None),
    "ids": ((40, 100), np.int64, None),
    "mask": ((9,), np.bool_, None),
    "nothing": ((0, 4), np.float32, None),
    "one": ((), np.float32, None),
}
RULES = [Rule(name, format) for name, (_, _, format) in CASES.items()]


def tensors(seed: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    made = {name: np.asarray(rng.standard_normal(shape)).astype(dtype) for name, (shape, dtype, _) in CASES.items()}
    made["int8.kernel"][:, 5] = 0  # a column of zeros has the scale 0
    return made


def in_memory(source: Path, target: Path, rules: Any) -> bytes:
    """The file that is made by quantizing every tensor whole, in memory."""
    file = open_tensors(source)
    plans, _ = converting.plans_for(file, rules, strict=False)
    arrays = {name: file.array(name) for name in file}
    quantized = {name: lowbit.quantize(arrays[name], plan.config) for name, plan in plans.items() if plan.config}
    save(target, arrays | quantized, metadata=file.metadata)
    return target.read_bytes()


INT8 = ("--format", "int8", "--rule", "re:(?!int8).*=keep")


def stopped(monkeypatch: pytest.MonkeyPatch, error: BaseException | None = None) -> Callable[[], int]:
    """Raise `error` when the third chunk with scales is written. Returns a function that counts components."""
    names: list[str] = []
    write = _staging.StagingFile.put

    def put(self: Any, name: str, *args: Any) -> None:
        if error and name.endswith("scales") and sum(known.endswith("scales") for known in names) == 2:
            raise error
        names.append(name)
        write(self, name, *args)

    monkeypatch.setattr(_staging.StagingFile, "put", put)
    return lambda: len(names)
