"""Run a benchmark as on a processor with AVX2 and without AVX-512, with all libraries.

    python benchmarks/avx2.py benchmarks/matmul.py --peers --save products-avx2

JAX, onnxruntime and OpenVINO ask the processor what it has, and none of them has a setting that all of its kernels
follow. So each CPUID instruction in copies of them becomes a breakpoint, which hide_avx512.cc answers. The copies are
kept in build/avx2 (remove it after an upgrade of them); the environment itself is not changed. Needs Linux on x86-64, a
C++ compiler and objdump.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
COPY = HERE.parent / "build" / "avx2"
LIBRARIES = ("jaxlib", "onnxruntime", "openvino")
CPUID, BREAKPOINT = b"\x0f\xa2", b"\xcc\x90"  # int3, nop


def cpuid_offsets(path: Path) -> list[int]:
    """Where the CPUID instructions of a shared library are in its file."""
    sections = []
    for line in run("objdump", "-hw", path).splitlines():
        fields = line.split()
        if "CODE" in line and fields[0].isdigit():
            size, address, offset = (int(fields[i], 16) for i in (2, 3, 5))
            sections.append((range(address, address + size), offset))
    places = []
    with subprocess.Popen(["objdump", "-d", "--no-show-raw-insn", path], stdout=subprocess.PIPE, text=True) as lines:
        assert lines.stdout is not None
        for line in lines.stdout:
            if "\tcpuid" in line:
                address = int(line.split(":")[0], 16)
                places += [offset + address - section.start for section, offset in sections if address in section]
    return places


def run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def copy_environment() -> None:
    """The environment of this Python, as links but for the libraries whose CPUID instructions are replaced."""
    shutil.rmtree(COPY, ignore_errors=True)
    shutil.copytree(sys.prefix, COPY, symlinks=True, copy_function=os.link)
    for path in COPY.glob("lib/python*/site-packages/lowbit"):  # always the one that was built last
        shutil.rmtree(path)
        path.symlink_to(Path(sys.prefix) / path.relative_to(COPY))
    run("c++", "-O1", "-shared", "-fPIC", HERE / "hide_avx512.cc", "-o", COPY / "hide_avx512.so")
    for package in LIBRARIES:
        for path in COPY.glob(f"lib/python*/site-packages/{package}/**/*.so*"):
            if path.is_symlink() or CPUID not in (code := bytearray(path.read_bytes())):
                continue
            for offset in (offsets := cpuid_offsets(path)):
                assert code[offset : offset + 2] == CPUID
                code[offset : offset + 2] = BREAKPOINT
            path.unlink()  # the link, not what it leads to
            path.write_bytes(code)
            if offsets:
                print(f"{path.name}: {len(offsets)} CPUID instructions", flush=True)
    (COPY / "done").touch()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    if not (COPY / "done").exists():
        copy_environment()
    os.environ.update(LOWBIT_ISA="avx2", LOWBIT_WITHOUT_AVX512="1", LD_PRELOAD=str(COPY / "hide_avx512.so"))
    python = str(COPY / "bin" / "python")
    os.execv(python, [python, *sys.argv[1:]])
