"""Make checkpoints/mlx_*.safetensors, as `make_checkpoints.py` makes the others.

pip install mlx==0.32.4 mlx-cpu
python tests/golden/make_checkpoints_mlx.py
"""

import json
from pathlib import Path

import numpy as np

OUT = Path(__file__).with_name("checkpoints")
MODULE = "model.layers.0.mlp.up_proj"


def make() -> None:
    import mlx.core as mx

    cases = [("affine", bits, 32, "float32") for bits in (2, 3, 4, 5, 6, 8)]
    cases += [("affine", 4, 64, "float16"), ("affine", 6, 64, "bfloat16")]
    cases += [("mxfp4", 4, 32, "bfloat16"), ("mxfp8", 8, 32, "bfloat16"), ("nvfp4", 4, 16, "bfloat16")]
    for seed, (mode, bits, group, dtype) in enumerate(cases):
        draw = np.random.default_rng(seed).standard_normal((32, 128), dtype=np.float32) * np.float32(0.02)
        weight = mx.array(draw).astype(getattr(mx, dtype))
        codes, scales, *biases = mx.quantize(weight, group_size=group, bits=bits, mode=mode)
        expected = mx.dequantize(codes, scales, *biases, group_size=group, bits=bits, mode=mode)
        tensors = {f"{MODULE}.weight": codes, f"{MODULE}.scales": scales, f"expected.{MODULE}.weight": expected}
        tensors |= {f"{MODULE}.biases": biases[0]} if biases else {}
        # The options for all modules are others, which those of the module override.
        options = {"group_size": 128, "bits": 2, MODULE: {"group_size": group, "bits": bits, "mode": mode}}
        config = {"quantization": options, "torch_dtype": str(expected.dtype).removeprefix("mlx.core.")}
        about = {"config.json": json.dumps(config), "maker": f"mlx {mx.__version__}"}
        name = f"mlx_{mode}_{bits}" + ("" if dtype == "float32" or mode != "affine" else f"_{dtype}")
        mx.save_safetensors(str(OUT / name), tensors, metadata=about)


if __name__ == "__main__":
    make()
