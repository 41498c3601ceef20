"""What the TPU and GPU compilers report for each kernel, and the bytes it moves, without the hardware. Not timed.

    make test-tpu-aot test-gpu-aot                           first, once: the compilers
    .venv-tpu/bin/python benchmarks/aot.py tpu --save aot-tpu
    .venv-gpu/bin/python benchmarks/aot.py gpu --save aot-gpu

Bytes are counted by running the kernel's own index maps over its grid; the minimum is the stored weight, x and y once
each. The roofline is bytes over the published bandwidth of the chip: a bound, not a measured time.
"""

from importlib import import_module

from measure import parser

if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("platform", choices=["tpu", "gpu"])
    args = arguments.parse_args()
    import_module(f"aot_{args.platform}").run(args)
