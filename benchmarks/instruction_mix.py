"""Count the instructions of the inner loops of the ARM kernels. Nothing is timed: no ARM machine was at hand.

    python benchmarks/instruction_mix.py build/arm/lowbit_native.so --out benchmarks/results/arm_instructions.md

For each kernel, the innermost loop with the most multiply-adds is disassembled and its instructions are counted:
multiply-adds, table lookups, permutations, loads (of which broadcasts), stores, spills to the stack, and the rest. Of
the loops that only decode weights into a panel, it is the one with the most permutations per store.
"""

import argparse
import re
import subprocess
from collections import Counter
from pathlib import Path

# The products that an instruction computes.
MULTIPLY = {"fmla": 4, "sdot": 16, "smmla": 32, "smull": 8, "smull2": 8, "smlal": 8, "smlal2": 8}
# What each line of the table shows: the instruction set, the kernel, and the function as objdump demangles it.
KERNELS = [
    *(
        (isa, f"exact, {what}", pattern)
        for isa in ("neon",)
        for what, pattern in [
            ("tile of 6 rows x 16 columns", r"multiply_tile<6, 4, "),
            ("1 row, NF4, scales along k", r"add_rows<1, true, 8, .*NibbleLevels<false>"),
            ("1 row, q4, scales along k", r"add_rows<1, true, 8, .*NibbleLevels<true>"),
            ("1 row, int8, scales along k", r"add_rows<1, true, 8, .*Int8"),
            ("1 row, ternary, scales along k", r"add_rows<1, true, 8, .*CrumbLevels"),
            ("1 row, fp8, scales along k", r"add_rows<1, true, 8, .*Fp8"),
            ("1 row, NF4, last axis", r"dot_rows<1, .*NibbleLevels<false>"),
            ("1 row, int8, last axis", r"dot_rows<1, .*Int8"),
            ("1 row, binary, last axis", r"dot_rows<1, .*BitLevels"),
        ]
    ),
    *(
        (isa, f"fast, {what}", pattern)
        for isa, rows, group in (("neon_i8mm", 6, 8), ("neon_dot", 6, 4), ("neon", 4, 4))
        for what, pattern in [
            (f"tile of {rows} rows x 16 columns", rf"whole_tile<{rows}, false>"),
            ("tile of 2 rows x 16 columns", r"whole_tile<2, false>"),
            (f"tile of {rows} rows x 8 columns, blocks", rf"blocked_tile<{rows}, 2, false>"),
            ("tile of 2 rows x 8 columns, blocks", r"blocked_tile<2, 2, false>"),
            (f"panel, {group} rows x 16 bytes, NF4", r"panel_of_rows<.*NibbleLevels<false>"),
            (f"panel, {group} rows x 16 bytes, ternary", r"panel_of_rows<.*CrumbLevels"),
        ]
    ),
    *(
        (isa, f"fast, {what}", pattern)
        for isa in ("neon_dot", "neon")
        for what, pattern in [
            ("1 row, NF4", r"add_fast_rows<1, false, false, .*NibbleLevels<false>"),
            ("1 row, int8", r"add_fast_rows<1, false, false, .*Int8"),
            ("1 row, ternary", r"add_fast_rows<1, false, false, .*CrumbLevels"),
            ("1 row, NF4, last axis", r"fast_dots<.*NibbleLevels<false>"),
        ]
    ),
]


def functions(library: Path, objdump: str) -> dict[str, list[tuple[int, str]]]:
    """The instructions of each function, with their addresses."""
    text = subprocess.run(
        [objdump, "-dC", "--no-show-raw-insn", library], capture_output=True, text=True, check=True
    ).stdout
    found: dict[str, list[tuple[int, str]]] = {}
    lines: list[tuple[int, str]] = []
    for line in text.splitlines():
        if head := re.fullmatch(r"[0-9a-f]+ <(.*)>:", line):
            lines = found.setdefault(head[1], [])
        elif step := re.match(r"\s*([0-9a-f]+):\s+(.*)", line):
            lines.append((int(step[1], 16), step[2]))
    return found


def loops(lines: list[tuple[int, str]]) -> list[list[str]]:
    """The instructions of each innermost loop: from the target of a branch backwards to the branch."""
    start = lines[0][0] if lines else 0
    spans = []
    for at, text in lines:
        if target := re.match(r"(?:b\.\w+|cbn?z\s+\w+,|tbn?z\s+\w+, #\d+,|b)\s+([0-9a-f]+) <", text):
            to = int(target[1], 16)
            if start <= to < at:
                spans.append((to, at))
    inner = [a for a in spans if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
    return [[text for at, text in lines if first <= at <= last] for first, last in inner]


def name_of(text: str) -> str:
    return text.partition("\t")[0].strip()


def kind_of(text: str) -> str:
    name, rest = name_of(text), text.partition("\t")[2]
    if name in MULTIPLY:
        return "multiply-adds"
    if name.startswith(("ld", "st")) and "[sp" in rest:
        return "spills"
    if name in ("tbl", "tbx"):
        return "lookups"
    if name in ("zip1", "zip2", "uzp1", "uzp2", "trn1", "trn2", "ext"):
        return "permutations"
    if name == "ld1r" or (name == "dup" and "[" not in rest):
        return "broadcasts"
    if name == "prfm":
        return "prefetches"
    if name.startswith("ld"):
        return "loads"
    if name.startswith("st"):
        return "stores"
    return "vector" if re.search(r"\bv\d+\.", rest) else "scalar"


def weight(loop: list[str]) -> tuple[int, float, int]:
    """What makes a loop the one to show."""
    counts = Counter(map(kind_of, loop))
    return counts["multiply-adds"], counts["permutations"] / max(counts["stores"], 1), -len(loop)


KINDS = (
    "multiply-adds",
    "lookups",
    "permutations",
    "vector",
    "broadcasts",
    "loads",
    "stores",
    "spills",
    "prefetches",
    "scalar",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("--objdump", default="aarch64-linux-gnu-objdump")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = functions(options.library, options.objdump)
    rows = [
        f"| instruction set | inner loop | products | {' | '.join(KINDS)} | all |",
        "|" + " --- |" * (len(KINDS) + 4),
    ]
    for isa, what, pattern in KERNELS:
        names = [name for name in found if re.search(rf"lowbit::{isa}::{pattern}", name)]
        inner = [loop for name in names for loop in loops(found[name])]
        if not inner:
            raise SystemExit(f"{options.library} has no loop in a function {isa}::{pattern}.")
        loop = max(inner, key=weight)
        counts = Counter(map(kind_of, loop))
        products = sum(MULTIPLY.get(name_of(text), 0) for text in loop)
        cells = [str(counts[kind]) for kind in KINDS]
        rows.append(f"| {isa} | {what} | {products or '-'} | {' | '.join(cells)} | {len(loop)} |")
    head = (
        "Instructions in one turn of each inner loop, counted in the disassembled library; **not timed**.\n"
        "`products` is how many pairs of numbers it multiplies.\n\n"
        "`neon_dot` and `neon_i8mm` differ from `neon` only in the fast products. For one row of x, `neon_i8mm`\n"
        "has the loops of `neon_dot`.\n"
    )
    text = "\n".join(["# ARM kernels: instruction mix", "", head, *rows, ""])
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
