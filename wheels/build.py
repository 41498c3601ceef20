"""Build the wheels of lowbit for Linux: one for x86-64 and one for 64-bit ARM, each for every Python.

    python wheels/build.py x86_64 aarch64 --out dist/wheels

The C++ runtime is linked statically, and what it takes from a recent glibc is replaced (csrc/old_glibc.cc), so that a
wheel runs on every glibc that jaxlib runs on. Each wheel is checked by auditwheel, by the versions of its glibc
symbols, and by its size.
"""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
GLIBC = "2.24"  # jaxlib itself needs 2.27
LARGEST = 3_000_000  # bytes of a wheel
JAXLIB = "jaxlib==0.7.2"  # whose FFI headers every JAX that we support accepts (pyproject.toml)


def run(*command: object) -> str:
    """Run a command and return its output; show it and stop if the command fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        sys.exit(f"{' '.join(str(part) for part in command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def headers(folder: Path) -> Path:
    """The FFI headers, which are the same for every machine."""
    if not (folder / "jaxlib").exists():
        run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, JAXLIB)
    return folder / "jaxlib" / "include"


def compile_library(arch: str, folder: Path, include: Path) -> Path:
    toolchain = [f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'tests/arm/toolchain.cmake'}"] if arch == "aarch64" else []
    options = [f"-DXLA_FFI_INCLUDE_DIR={include}", "-DLOWBIT_STATIC_RUNTIME=ON", *toolchain]
    run("cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", *options)
    run("cmake", "--build", folder)
    return folder / "lowbit_native.so"


def glibc_of(library: Path) -> str:
    """The oldest glibc that has all symbols of the library."""
    found = re.findall(rb"GLIBC_([0-9.]+)", library.read_bytes())
    return max((text.decode() for text in found), key=lambda text: [int(part) for part in text.split(".")])


def check(wheel: Path, library: Path) -> None:
    needed = glibc_of(library)
    if [int(part) for part in needed.split(".")] > [int(part) for part in GLIBC.split(".")]:
        sys.exit(f"{library} needs glibc {needed}, more than {GLIBC}.")
    if wheel.stat().st_size > LARGEST:
        sys.exit(f"{wheel.name} has {wheel.stat().st_size} bytes, more than {LARGEST}.")
    policy = run(sys.executable, "-m", "auditwheel", "show", wheel)
    tag = f"manylinux_{GLIBC.replace('.', '_')}"
    if f'"{tag}' not in policy:
        sys.exit(f"auditwheel does not accept {wheel.name} as {tag}:\n{policy}")
    size = f"{wheel.stat().st_size / 1e6:.2f} MB, library {library.stat().st_size / 1e6:.2f} MB"
    print(f"{wheel.name}: {size}, needs glibc {needed}, accepted by auditwheel as {tag}")


def pack(arch: str, library: Path, work: Path, out: Path) -> None:
    """Pack a wheel around the library, name its platform, and check it."""
    made = work / f"{arch}-wheel"
    shutil.rmtree(made, ignore_errors=True)
    run(
        *(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", made, ROOT),
        *("-C", f"build-dir={work / 'package'}", "-C", f"cmake.define.LOWBIT_PREBUILT={library.resolve()}"),
    )
    tag = f"manylinux_{GLIBC.replace('.', '_')}_{arch}"
    run(sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", tag, next(made.glob("*.whl")))
    out.mkdir(parents=True, exist_ok=True)
    check(Path(shutil.copy(next(made.glob("*.whl")), out)), library)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arch", nargs="+", choices=["x86_64", "aarch64"])
    parser.add_argument("--out", type=Path, default=Path("dist/wheels"))
    parser.add_argument("--work", type=Path, default=Path("build/wheels"))
    options = parser.parse_args()
    work = options.work.resolve()
    include = headers(work / "headers")
    for arch in options.arch:
        pack(arch, compile_library(arch, work / arch, include), work, options.out)


if __name__ == "__main__":
    main()
