"""What the compilers of TPU and GPU say of each kernel, and what it moves, without the hardware.

    .venv-tpu/bin/python benchmarks/aot.py tpu --save aot-tpu

Bytes are counted by running the kernel's own index maps over its grid; the least possible is the stored weight once,
x once and y once. The roofline is these bytes over the published bandwidth: a bound, not a time.
"""

from importlib import import_module

from measure import Report, parser


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("platform", choices=["tpu", "gpu"])
    arguments.add_argument("--chips", nargs="+")
    arguments.add_argument("--rows", nargs="+", type=int, default=[1, 16, 256], metavar="M")
    arguments.add_argument("--shapes", nargs="+", default=["4096x4096", "4096x11008"], metavar="KxN")
    args = arguments.parse_args()
    platform = import_module(f"aot_{args.platform}")
    shapes = [tuple(map(int, shape.split("x"))) for shape in args.shapes]
    columns = ["chip", "shape", "kernel", "M", *platform.COLUMNS, "moved MB", "of the least", "roofline us"]
    report = Report(args, columns)
    for chip in args.chips or platform.CHIPS:
        for names, operands in platform.kernels(shapes, args.rows):
            found = platform.measure(chip, *operands)
            shape = f"{names['k']}x{names['n']}"
            report.row(chip, shape, names["kernel"], names["m"], *(found[column] for column in columns[4:]))
    report.save()


if __name__ == "__main__":
    main()
