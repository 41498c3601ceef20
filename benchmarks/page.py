"""Write the tables and the figures of the README and of the pages in docs, from benchmarks/results.

python benchmarks/page.py [PAGE ...]

PAGE: README, formats, performance, sharding, streaming, training, accelerators, checkpoints or quality.
"""

import json
import re
import sys
from pathlib import Path

import figures
from measure import RESULTS

DOCS = Path(__file__).parent.parent / "docs"
PAGES = (
    "README",
    "formats",
    "performance",
    "sharding",
    "streaming",
    "training",
    "accelerators",
    "checkpoints",
    "quality",
)
# What the value of each format is, for the README.
VALUES = {
    "int8": "code * scale",
    "nf4": "one of 16 levels * scale of its block",
    "q4": "one of 16 small integers * 8-bit scale of its block * scale of its column",
    "q3": "one of 8 small integers, scales as in q4",
    "q2": "one of 4 small integers, scales as in q4",
    "int6": "(code - 32) * scale, or code * scale + offset",
    "int5": "(code - 16) * scale, or with an offset",
    "int4": "(code - 8) * scale, or with an offset",
    "int3": "(code - 4) * scale, or with an offset",
    "int2": "(code - 2) * scale, or with an offset",
    "fp8": "float8 e4m3 * scale",
    "fp8_e5m2": "float8 e5m2 * scale",
    "mxfp4": "float4 e2m1 * power of two of its block",
    "nvfp4": "float4 e2m1 * float8 scale of its block * scale of the matrix",
    "ternary": "-scale, 0 or scale",
    "binary": "-scale or scale",
}


def load(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def origin(found: dict) -> str:
    forms = {"processor": "{}", "cores": "{} cores", "instruction set of lowbit": "instruction set {}"}
    known = {key: value for key, value in found["machine"].items() if value is not None}
    machine = ", ".join(forms.get(key, f"{key} {{}}").format(value) for key, value in known.items())
    return f"`{found['command']}`, {found['date']}: {machine}.\n"


def speedups(found: dict, shape: str) -> dict[str, dict[int, float]]:
    """product -> M -> speed-up."""
    table: dict[str, dict[int, float]] = {}
    for row in found["rows"]:
        if row[0] == shape:
            table.setdefault(row[2], {})[row[1]] = row[5]
    return table


def product_table(name: str, shape: str) -> str:
    found = load(name)
    table = speedups(found, shape)
    rows = sorted({m for of_m in table.values() for m in of_m})
    lines = [f"| {shape} | " + " | ".join(f"M = {m}" for m in rows) + " |", "| --- " * (len(rows) + 1) + "|"]
    for product, of_m in table.items():
        lines.append(f"| {product} | " + " | ".join(f"{of_m[m]:.2f}" if m in of_m else "" for m in rows) + " |")
    return "\n".join(lines) + "\n\n" + origin(found)


# The products of other libraries with weights of the same bits and activations of the same kind.
PEERS = {
    "q4 fast": ("onnxruntime 4-bit int8", "OpenVINO u4 int8"),
    "q4 exact": ("OpenVINO u4 exact",),
    "nf4 exact": ("OpenVINO nf4 exact",),
    "int8 fast": ("onnxruntime int8 int8",),
}


def peers_table(name: str, shape: str) -> str:
    """The speed of products relative to those of other libraries."""
    table = speedups(load(name), shape)
    rows = sorted({m for of_m in table.values() for m in of_m})
    lines = ["| relative speed | " + " | ".join(f"M = {m}" for m in rows) + " |", "| --- " * (len(rows) + 1) + "|"]
    for ours, others in PEERS.items():
        for other in others:
            if other in table:
                cells = (f"{table[ours][m] / table[other][m]:.2f}" for m in rows)
                lines.append(f"| {ours} / {other} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plain_table(name: str) -> str:
    """All rows, labels before numbers, without empty columns."""
    found = load(name)
    cells = [found["columns"], *([shown(value) for value in row] for row in found["rows"])]
    columns = [column for column in zip(*cells, strict=True) if any(column[1:])]
    words = [column for column in columns if not all(map(_is_number, column[1:]))]
    first = [c for c in words if c is words[0] or not any(value[:1].isdigit() for value in c[1:])]
    head, *rows = zip(*first, *(column for column in columns if column not in first), strict=True)
    lines = ["| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rows)]
    return "\n".join(lines) + "\n\n" + origin(found)


def _is_number(cell: str) -> bool:
    return cell in ("", "-") or re.fullmatch(r"-?[\d.,]+", cell) is not None


def convolutions_table(name: str) -> str:
    """For each case the speed-up of patches over the decoded kernel; in bold where they are chosen."""
    found, cases = load(name), {}
    for patches, outputs, case, way, _, speedup, choice in found["rows"]:
        if "patches" in way:
            mark = "**" if choice == "patches" else ""
            cases.setdefault((case, patches, outputs), {})[way.replace(" patches", "")] = f"{mark}{speedup:.2f}{mark}"
    ways = list(dict.fromkeys(way for row in cases.values() for way in row))
    lines = ["| case | patches | outputs | " + " | ".join(ways) + " |", "| --- " * (len(ways) + 3) + "|"]
    for (case, patches, outputs), row in cases.items():
        lines.append(f"| {case} | {patches} | {outputs} | " + " | ".join(row.get(way, "") for way in ways) + " |")
    return "\n".join(lines) + "\n\n" + origin(found)


def formats_table(name: str) -> str:
    found = load(name)
    lines = ["| format | bits | N(0, 1) | MiniLM | KL |", "| --- | --- | --- | --- | --- |"]
    for bits, _, format, normal, minilm, divergence in found["rows"]:
        lines.append(f"| {format} | {bits:.3f} | {normal:.3g} | {minilm:.3g} | {three_digits(divergence)} |")
    return "\n".join(lines) + "\n\n" + origin(found)


def weighting_table(name: str) -> str:
    """For each format a row, for each weighting the KL; with the standard error of its difference from plain."""
    found, table = load(name), {}
    for _, divergence, format, _, _, error in found["rows"]:
        base, _, weighting = format.partition(", ")
        table.setdefault(base, {})[weighting] = f"{divergence:.4f}" + (f" ± {error:.4f}" if error else "")
    weightings = list(dict.fromkeys(weighting for row in table.values() for weighting in row if weighting))
    lines = ["| format | " + " | ".join(weightings) + " |", "| --- " * (len(weightings) + 1) + "|"]
    for base, row in table.items():
        cells = [row.get(weighting, "") for weighting in weightings]
        lines.append(f"| {base} | " + " | ".join(cells if any(cells) else [row[""], *cells[1:]]) + " |")
    return "\n".join(lines) + "\n\n" + origin(found)


def readme_table(name: str) -> str:
    """The formats by falling bits, with the root mean square error on N(0, 1)."""
    rows = {row[2]: row for row in load(name)["rows"]}
    lines = ["| name | bits per weight | error on N(0, 1) | KL | value |", "| --- | --- | --- | --- | --- |"]
    for format in sorted(VALUES, key=lambda format: (-rows[format][0], rows[format][1])):
        bits, error, *_, divergence = rows[format]
        kl = three_digits(divergence)
        lines.append(f"| `{format}` | {bits:.2f} | {error:.3g} | {kl} | {VALUES[format]} |")
    return "\n".join(lines) + "\n"


def three_digits(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else ""


def shown(value: object) -> str:
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)
    if 0 < value < 0.1:  # two digits would show different errors as equal
        return f"{value:.5f}" if value < 0.01 else f"{value:.4f}"
    return f"{value:,.0f}" if value >= 1e5 else f"{value:.2f}"


def qat_table(name: str) -> str:
    found = load(name)
    lines = ["| " + " | ".join(found["columns"]) + " |", "| --- " * len(found["columns"]) + "|"]
    for format, *losses in found["rows"]:
        digits = [4] * 3 + [2] * (len(losses) - 3)  # losses, then percentages and a time
        numbers = ("-" if x is None else f"{x:.{n}f}" for x, n in zip(losses, digits, strict=True))
        lines.append(f"| {format} | " + " | ".join(numbers) + " |")
    return "\n".join(lines) + "\n\n" + origin(found)


def aot_table(name: str, shape: str) -> str:
    """For each bfloat16 kernel and each chip: bundles of the inner loop, for each number of rows."""
    found = load(name)
    rows = [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]
    rows = [row for row in rows if row["shape"] == shape and row["kernel"].endswith("bfloat16")]
    chips, of_m = (list(dict.fromkeys(row[key] for row in rows)) for key in ("chip", "M"))
    bundles = {(row["kernel"], row["chip"], row["M"]): f"{row['per 1024 weights']:.2f}" for row in rows}
    lines = ["| product | " + " | ".join(chips) + " |", "| --- " * (len(chips) + 1) + "|"]
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        cells = (" / ".join(bundles[kernel, chip, m] for m in of_m) for chip in chips)
        lines.append(f"| {kernel.removesuffix(' bfloat16')} | " + " | ".join(cells) + " |")
    moved = [row["of the least"] for row in rows]
    text = f"Every product moves {min(moved):.3f} to {max(moved):.3f} times the minimum number of bytes.\n"
    return "\n".join([*lines, "", text, origin(found)])


def gpu_table(name: str) -> str:
    """Rows of bfloat16, with a column for all chips; the text covers spills and loads of the weight."""
    found, rows = load(name), {}
    for chip, m, kernel, *values in found["rows"]:
        if kernel.endswith("bfloat16"):
            rows.setdefault((kernel.removesuffix(" bfloat16"), m), {})[chip] = values
    chips = list(dict.fromkeys(row[0] for row in found["rows"]))
    both = " / ".join(chips)
    lines = [
        f"| product | M | registers {both} | shared KiB {both} | programs | moved MB | least MB | bound us {both} |"
    ]
    lines.append("| --- " * 8 + "|")
    for (kernel, m), of in rows.items():
        _, _, _, programs, _, moved, least, _ = of[chips[0]]
        each = [" / ".join(f"{of[chip][i]:.{digits}f}" for chip in chips) for i, digits in ((0, 0), (2, 0), (7, 1))]
        lines.append(f"| {kernel} | {m} | {each[0]} | {each[1]} | {programs} | {moved:.1f} | {least:.1f} | {each[2]} |")
    return "\n".join(lines) + "\n\n" + origin(found)


def quality_table(name: str) -> str:
    """KL with standard errors, by falling bits."""
    found = load(name)
    lines = [
        "| model | bits | KL, articles | 99 % | KL, our prose | 99 % | articles, relative to nf4 |",
        "| --- " * 7 + "|",
    ]
    for bits, of_nf4, model, *each in sorted(found["rows"], key=lambda row: -row[0]):
        cells = [f"{mean:.3f} ± {error:.3f} | {most:.2f}" for mean, error, most in (each[:3], each[3:])]
        lines.append(f"| {model} | {bits:.2f} | {' | '.join(cells)} | {of_nf4:.2f} |")
    return "\n".join(lines) + "\n\n" + origin(found)


def main() -> None:
    for name in sys.argv[1:] or PAGES:
        page = path_of(name)
        text = page.read_text()
        page.write_text(rendered(text))
        for results, file in re.findall(r"<!-- figure ([\w-]+) (\S+) -->", text):
            (DOCS / file).write_text(DRAWN[name](results))


def path_of(page: str) -> Path:
    return DOCS.parent / "README.md" if page == "README" else DOCS / f"{page}.md"


def rendered(text: str) -> str:
    """The text of a page with its tables from the results."""
    for kind, name, shape in re.findall(r"<!-- (\w+) ([\w-]+) ?(\S*) -->", text):
        if kind == "figure":
            continue
        made = SHAPED[kind](name, shape) if kind in SHAPED else TABLES[kind](name)
        start = f"<!-- {kind} {name}{' ' + shape if shape else ''} -->\n"
        before, rest = text.split(start, 1)
        after = rest.split("<!-- end -->\n", 1)[1]
        text = f"{before}{start}{made}<!-- end -->\n{after}"
    return text


# The figures by page.
DRAWN = {
    "performance": lambda name: figures.products(speedups(load(name), "4096x4096")),
    "quality": lambda name: figures.drawn(load(name)["rows"]),
    "README": lambda name: figures.front(load(name)["rows"], load("language_model-avx512")),
}
SHAPED = {"products": product_table, "peers": peers_table, "aot": aot_table}
TABLES = {
    "table": plain_table,
    "convolutions": convolutions_table,
    "qat": qat_table,
    "gpu": gpu_table,
    "formats": formats_table,
    "readme": readme_table,
    "weighting": weighting_table,
    "quality": quality_table,
}


if __name__ == "__main__":
    main()
