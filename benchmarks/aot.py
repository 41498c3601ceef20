"""What the compilers of TPU and GPU say of each kernel, and what it moves, without the hardware. No time is measured.

    make test-tpu-aot test-gpu-aot                           first, once: the compilers
    .venv-tpu/bin/python benchmarks/aot.py tpu --save aot-tpu
    .venv-gpu/bin/python benchmarks/aot.py gpu --save aot-gpu

Bytes are counted by running the kernel's own index maps over its grid; the least possible is the stored weight once,
x once and y once. The roofline is bytes over the published bandwidth of the chip: a bound, not a time.
"""

from importlib import import_module

from measure import parser

if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("platform", choices=["tpu", "gpu"])
    args = arguments.parse_args()
    import_module(f"aot_{args.platform}").run(args)
