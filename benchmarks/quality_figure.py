"""The figure of docs/quality.md: KL against bits, drawn from a results file. Readable on light and dark pages."""

import math
from collections.abc import Sequence

WIDTH, HEIGHT = 760, 460
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 16, 46
LABEL, LINE = 60, 12  # the room that a label needs
STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #24292f }
.back { fill: #ffffff } .grid { stroke: #d0d7de } .axis { stroke: #57606a }
.plain { fill: #ffffff; stroke: #0969da; stroke-width: 1.5 } .calibrated { fill: #0969da; stroke: #0969da }
.allocated { fill: #1a7f37 } .peer { fill: #bc4c00 } .gain { stroke: #0969da; stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .back { fill: #0d1117 } .grid { stroke: #30363d } .axis { stroke: #8b949e }
.plain { fill: #0d1117; stroke: #58a6ff } .calibrated { fill: #58a6ff; stroke: #58a6ff }
.allocated { fill: #3fb950 } .peer { fill: #f0883e } .gain { stroke: #58a6ff }
}
</style>"""
KINDS = {
    "plain": "lowbit, without data",
    "calibrated": "lowbit, calibrated",
    "allocated": "lowbit, allocated and calibrated",
    "peer": "llama.cpp with importance matrix, qwix GPTQ",
}


def kind_of(name: str) -> str:
    if name.startswith(("llama.cpp", "qwix")):
        return "peer"
    return "allocated" if name.startswith("allocated") else "calibrated" if name.endswith("calibrated") else "plain"


def drawn(rows: Sequence[Sequence], most: float = 3.0) -> str:
    """An SVG of the rows (bits, ..., name, KL of the articles, ...) of benchmarks/calibrated_model.py."""
    points = [(row[0], row[3], row[2]) for row in rows if row[3] <= most]
    lowest = 10 ** math.floor(math.log10(min(kl for _, kl, _ in points)))
    first, last = math.floor(min(bits for bits, _, _ in points)), math.ceil(max(bits for bits, _, _ in points))

    def at(bits: float, kl: float) -> tuple[float, float]:
        across = (bits - first) / (last - first)
        down = math.log(most / kl) / math.log(most / lowest)
        return LEFT + across * (WIDTH - LEFT - RIGHT), TOP + down * (HEIGHT - TOP - BOTTOM)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'aria-label="KL against bits per weight">',
        STYLE,
        f'<rect class="back" width="{WIDTH}" height="{HEIGHT}"/>',
    ]
    for bits in range(first, last + 1):
        x, bottom = at(bits, lowest)
        out.append(f'<path class="grid" d="M{x:.1f} {TOP}V{bottom:.1f}"/>')
        out.append(f'<text x="{x:.1f}" y="{bottom + 17:.1f}" text-anchor="middle">{bits}</text>')
    for kl in ticks(lowest, most):
        x, y = at(first, kl)
        out.append(f'<path class="grid" d="M{x:.1f} {y:.1f}H{WIDTH - RIGHT}"/>')
        out.append(f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{kl:g}</text>')
    out.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">bits per parameter, all tensors</text>')
    out.append(f'<text transform="translate(14 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">KL, nats</text>')
    known = {name: at(bits, kl) for bits, kl, name in points}
    for name, (x, y) in known.items():
        base = name.removesuffix(", calibrated")
        if base != name and base in known:
            out.append(f'<path class="gain" d="M{known[base][0]:.1f} {known[base][1]:.1f}L{x:.1f} {y:.1f}"/>')
    for name, (x, y) in known.items():
        out.append(f'<circle class="{kind_of(name)}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>')
        crowded = any(0 < other - x < LABEL and abs(at - y) < LINE for other, at in known.values())
        place = f'x="{x - 7:.1f}" text-anchor="end"' if crowded or x + LABEL > WIDTH else f'x="{x + 7:.1f}"'
        out.append(f'<text {place} y="{y + 4:.1f}">{label(name)}</text>')
    for i, (kind, text) in enumerate(KINDS.items()):
        x, y = WIDTH - RIGHT - 290, TOP + 14 + 18 * i
        out.append(f'<circle class="{kind}" cx="{x}" cy="{y}" r="4"/><text x="{x + 10}" y="{y + 4}">{text}</text>')
    return "\n".join([*out, "</svg>", ""])


def label(name: str) -> str:
    return name.removeprefix("llama.cpp ").removeprefix("allocated, ").removesuffix(", calibrated")


def ticks(lowest: float, most: float) -> list[float]:
    """1, 2 and 5 of each power of ten in the range."""
    powers = range(math.floor(math.log10(lowest)), math.ceil(math.log10(most)) + 1)
    each = (m * 10.0**p for p in powers for m in (1, 2, 5))
    return [x for x in each if lowest * 0.999 <= x <= most]
