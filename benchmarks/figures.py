"""Figures drawn from results files as SVG, for light and dark pages: KL against bits, and speed against float32."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from html import escape

STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #24292f } .title { font-weight: 600; font-size: 13px }
.back { fill: #ffffff } .grid { stroke: #d8dee4 } .soft { fill: #57606a }
.plain { fill: #ffffff; stroke: #0969da; stroke-width: 1.5 } .calibrated { fill: #0969da; stroke: #0969da }
.allocated { fill: #1a7f37 } .peer { fill: #bc4c00 } .gain { stroke: #0969da; stroke-dasharray: 3 3 }
.line { fill: none; stroke-width: 2 } .exact { stroke: #8c959f } .fast { stroke: #0969da }
.others { stroke: #bc4c00; stroke-dasharray: 2 3 }
.ours { fill: #0969da } .float32 { fill: #8c959f } .prompt { fill-opacity: 0.45 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .back { fill: #0d1117 } .grid { stroke: #30363d } .soft { fill: #9198a1 }
.plain { fill: #0d1117; stroke: #58a6ff } .calibrated { fill: #58a6ff; stroke: #58a6ff }
.allocated { fill: #3fb950 } .peer { fill: #f0883e } .gain { stroke: #58a6ff }
.exact { stroke: #848d97 } .fast { stroke: #58a6ff } .others { stroke: #f0883e }
.ours { fill: #58a6ff } .float32 { fill: #848d97 }
}
</style>"""
KINDS = {
    "plain": "lowbit, without data",
    "calibrated": "lowbit, calibrated",
    "allocated": "lowbit, allocated and calibrated",
    "peer": "others with the same data",
}
CHARACTER, LINE = 7.4, 13  # the size of text, for labels that do not collide


@dataclasses.dataclass(frozen=True)
class Box:
    left: float
    top: float
    width: float
    height: float

    def overlaps(self, other: "Box") -> bool:
        across = self.left < other.left + other.width and other.left < self.left + self.width
        return across and self.top < other.top + other.height and other.top < self.top + self.height


def drawn(rows: Sequence[Sequence]) -> str:
    """An SVG of the rows (bits, ..., name, KL of the articles, ...) of benchmarks/calibrated_model.py."""
    return svg(760, 460, "KL against bits per parameter", quality(rows, Box(62, 30, 682, 384)))


def front(rows: Sequence[Sequence], speeds: dict) -> str:
    """The figure of the README: quality, and the speed of a language model (benchmarks/language_model.py)."""
    parts = [*quality(rows, Box(56, 36, 450, 330)), *speed(speeds, Box(630, 36, 250, 330))]
    return svg(900, 416, "KL against bits per parameter, and speed against float32", parts)


def svg(width: int, height: int, label: str, parts: Iterable[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">'
    return "\n".join([head, STYLE, f'<rect class="back" width="{width}" height="{height}"/>', *parts, "</svg>", ""])


def text(x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>'


def quality(rows: Sequence[Sequence], box: Box, most: float = 3.0) -> list[str]:
    """Points of bits and KL up to `most`. Rows by gradients are close to the calibrated ones, and left to the table."""
    points = {row[2]: (row[0], row[3]) for row in rows if row[3] <= most and not row[2].endswith(", by gradients")}
    lowest = 10 ** math.floor(math.log10(min(kl for _, kl in points.values())))
    first, last = (
        round_(end(bits for bits, _ in points.values())) for round_, end in ((math.floor, min), (math.ceil, max))
    )
    bottom = box.top + box.height

    def at(bits: float, kl: float) -> tuple[float, float]:
        across, down = (bits - first) / (last - first), math.log(most / kl) / math.log(most / lowest)
        return box.left + across * box.width, box.top + down * box.height

    out = [text(box.left, box.top - 14, "KL from float32, nats (lower is better)", kind="title")]
    for bits in range(first, last + 1):
        x = at(bits, lowest)[0]
        out += [f'<path class="grid" d="M{x:.1f} {box.top}V{bottom:.1f}"/>', text(x, bottom + 17, f"{bits}", "middle")]
    for kl in ticks(lowest, most):
        y = at(first, kl)[1]
        out.append(f'<path class="grid" d="M{box.left} {y:.1f}H{box.left + box.width}"/>')
        out.append(text(box.left - 6, y + 4, f"{kl:g}", "end"))
    out.append(text(box.left + box.width / 2, bottom + 36, "bits per parameter, all tensors", "middle", "soft"))
    places = {name: at(*point) for name, point in points.items()}
    for name, (x, y) in places.items():
        plain = places.get(name.removesuffix(", calibrated"), (x, y))
        if plain != (x, y):
            out.append(f'<path class="gain" d="M{plain[0]:.1f} {plain[1]:.1f}L{x:.1f} {y:.1f}"/>')
    kinds = [kind for kind in KINDS if any(kind_of(name) == kind for name in places)]
    legend = Box(box.left + box.width - 222, box.top + 4, 218, 18 * len(kinds) + 4)
    out += [f'<circle class="{kind_of(name)}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for name, (x, y) in places.items()]
    out += labels(places, box, legend)
    for i, kind in enumerate(kinds):
        x, y = legend.left + 6, legend.top + 12 + 18 * i
        out += [f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>', text(x + 10, y + 4, KINDS[kind])]
    return out


def labels(places: dict[str, tuple[float, float]], box: Box, legend: Box) -> list[str]:
    """A label beside each point, where it covers no point and no other label."""
    taken = [legend, *(Box(x - 5, y - 5, 10, 10) for x, y in places.values())]
    out = []
    for name, (x, y) in places.items():
        width = CHARACTER * len(label(name))
        beside = [(dx, dy) for dy in (0, -11, 11, -22, 22, -33, 33) for dx in (8, -8 - width, -width / 2)]
        boxes = [Box(x + dx, y + dy - LINE / 2, width, LINE) for dx, dy in beside]
        inside = [b for b in boxes if b.left > box.left and b.left + b.width < box.left + box.width + 8]
        free = [b for b in inside if not any(b.overlaps(other) for other in taken)]
        chosen = (free or inside)[0]
        taken.append(chosen)
        out.append(text(chosen.left, chosen.top + LINE / 2 + 4, label(name)))
    return out


def speed(found: dict, box: Box) -> list[str]:
    """For each model two bars: tokens a second against float32, when generating and when reading a prompt."""
    rows = [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]
    base = next(row for row in rows if row["model"] == "float32")
    most = max(row[key] / base[key] for row in rows for key in ("tok/s", "prompt tok/s"))
    step, out = (
        box.height / len(rows),
        [text(box.left - 80, box.top - 14, "Tokens per second, times float32", kind="title")],
    )
    for i, row in enumerate(rows):
        y, name = box.top + step * i, row["model"]
        out.append(text(box.left - 6, y + step / 2 + 2, name.removeprefix("llama.cpp "), "end"))
        kind = "float32" if name == "float32" else "peer" if kind_of(name) == "peer" else "ours"
        for key, down, extra in (("tok/s", 0.08, ""), ("prompt tok/s", 0.46, " prompt")):
            times = row[key] / base[key]
            width, top, tall = times / most * (box.width - 34), y + down * step, 0.34 * step
            out.append(
                f'<rect class="{kind}{extra}" x="{box.left}" y="{top:.1f}" width="{width:.1f}" height="{tall:.1f}"/>'
            )
            out.append(text(box.left + width + 4, top + tall / 2 + 4, f"{times:.1f}"))
    y = box.top + box.height + 12
    for x, kind, words in (
        (-80, "ours", "lowbit"),
        (-14, "peer", "llama.cpp"),
        (74, "float32", "generating"),
        (166, "float32 prompt", "reading"),
    ):
        out.append(f'<rect class="{kind}" x="{box.left + x}" y="{y:.1f}" width="10" height="10"/>')
        out.append(text(box.left + x + 14, y + 9, words))
    machine = f"SmolLM2-135M, {found['machine']['cores']} cores, {found['machine']['instruction set of lowbit']}"
    return [*out, text(box.left - 80, y + 28, machine, kind="soft")]


def products(table: dict[str, dict[int, float]], formats: Sequence[str] = ("q4", "nf4", "int8", "ternary")) -> str:
    """Speed-ups (product -> rows -> times float32) against the rows of x, a panel for each format."""
    ours = [product for product in table if product.endswith((" exact", " fast")) and product.split()[0] in formats]
    peers = [of for product, of in table.items() if product.startswith(("onnxruntime", "OpenVINO"))]
    rows = list(table[ours[0]])
    best = {m: max(of[m] for of in peers) for m in rows} if peers else {}
    most = max(value for of in [best, *(table[product] for product in ours)] for value in of.values())
    out = [text(44, 20, "Times the speed of float32, against the rows of x", kind="title")]
    for i, format in enumerate(formats):
        box = Box(44 + 216 * i, 56, 190, 190)

        def at(m: float, times: float, box: Box = box) -> tuple[float, float]:
            across, down = math.log(m) / math.log(rows[-1]), 1 - math.log(times) / math.log(most)
            return box.left + across * box.width, box.top + down * box.height

        out.append(text(box.left, box.top - 10, format))
        for times in ticks(1, most):
            y = at(1, times)[1]
            out.append(f'<path class="grid" d="M{box.left} {y:.1f}h{box.width}"/>')
            out += [text(box.left - 6, y + 4, f"{times:g}", "end")] * (i == 0)
        out += [text(at(m, 1)[0], box.top + box.height + 17, f"{m}", "middle") for m in rows]
        lines = {"others": best, "exact": table.get(f"{format} exact", {}), "fast": table.get(f"{format} fast", {})}
        for kind, of in lines.items():
            points = " ".join("{:.1f},{:.1f}".format(*at(m, max(times, 1))) for m, times in of.items())
            out.append(f'<polyline class="line {kind}" points="{points}"/>')
    for x, kind, words in (
        (0, "exact", "lowbit, exact"),
        (130, "fast", "lowbit, fast"),
        (250, "others", "the fastest of onnxruntime and OpenVINO at 4 and 8 bits"),
    ):
        out += [f'<path class="line {kind}" d="M{44 + x} 286h22"/>', text(72 + x, 290, words)]
    return svg(900, 300, "Speed against the rows of x for each format", out)


def kind_of(name: str) -> str:
    if name.startswith(("llama.cpp", "qwix")):
        return "peer"
    if name.startswith("allocated"):
        return "allocated"
    return "calibrated" if name.endswith(("calibrated", "tuned")) else "plain"


def label(name: str) -> str:
    return name.removeprefix("llama.cpp ").removeprefix("allocated, ").removesuffix(", calibrated")


def ticks(lowest: float, most: float) -> list[float]:
    """1, 2 and 5 of each power of ten in the range."""
    powers = range(math.floor(math.log10(lowest)), math.ceil(math.log10(most)) + 1)
    each = (m * 10.0**p for p in powers for m in (1, 2, 5))
    return [x for x in each if lowest * 0.999 <= x <= most]
