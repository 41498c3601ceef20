"""Hooks of the documentation site: pages of files outside of docs, and links between all of them."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
# Files outside of docs, and the pages that the site has of them.
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing/index.md",
    "SECURITY.md": "security.md",
    "CITATION.cff": "CITATION.cff",
    "LICENSE": "LICENSE",
    "benchmarks/results/arm_instructions.md": "arm-instructions.md",
    **{f"examples/{path.name}": f"examples/{path.stem}.md" for path in sorted((ROOT / "examples").glob("*.py"))},
}
CELL = re.compile(r"<t[dh][^>]*>.*?</t[dh]>", re.DOTALL)
TAG = re.compile(r"(<[^>]*>)")
# A line must not break inside of these: AVX-512, 8-bit, all-reduce, M = 16, x @ w.T, 4096 x 11008, 0.12 ± 0.01,
# 55 / 60, 1 to 8 bits, 538 MB, N(0, 1).
UNBROKEN = re.compile(
    r"N\(0, 1\)|RISC-V|\w+-\d[\w.]*|\d+-bit\b|(?:\d+ )?all-(?:reduce|gather)\b|\w = \d+|\w @ \w[\w.]*|"
    r"\d[\d.]* to \d[\d.]*(?: bits?\b)?|\d[\d.,]*(?: [x±/] \d[\d.,]*)+|\d[\d.,]* (?:%|(?:[kMG]?B|m?s|bits?)\b)"
)
SHORT_CODE = re.compile(r"<code>([^<]{1,28}</code>)")
LONG_CODE = re.compile(r"<code>[^<]{29,}</code>")
# Inside of longer code, a line must not break after the hyphens of options: --save, compressed-tensors.
HYPHENATED = re.compile(r"(?<![^ >])(?=[^ <]{1,28}[ <])[^ <]*-[^ <]*")
_SPAN = r'<span class="unbroken">\g<0></span>'
LINK = re.compile(r"(\]\(|(?:src|href)=\")([^)\"#:]+)(#[^)\"]*)?([)\"])")


def on_files(files: Files, config: Any) -> Files:
    for source, target in OUTSIDE.items():
        text = (ROOT / source).read_text("utf-8")
        if source.endswith(".py"):
            text = f"`{source}`\n\n```python\n{text}```\n"  # the theme adds the title from the navigation
        files.append(File.generated(config, target, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point relative links at the places that files have on the site, and hide a navigation of one page."""
    here = page.file.src_uri
    if page.parent is None:  # a tab of one page needs no list of its pages
        page.meta["hide"] = ["navigation"]
    source = next((path for path, target in OUTSIDE.items() if target == here), f"docs/{here}")

    def moved(link: re.Match[str]) -> str:
        before, target, anchor, after = link.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        on_site = OUTSIDE.get(path, path.removeprefix("docs/"))
        known = path in OUTSIDE or (path.startswith("docs/") and (ROOT / path).is_file())
        moved_to = posixpath.relpath(on_site, posixpath.dirname(here) or ".") if known else target
        return f"{before}{moved_to}{anchor or ''}{after}"

    return LINK.sub(moved, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Mark what must stay on one line, and the cells of tables with text that needs some width."""
    blocks = re.split(r"(<pre.*?</pre>)", html, flags=re.DOTALL)
    for i in range(0, len(blocks), 2):
        block = SHORT_CODE.sub(r'<code class="unbroken">\1', _unbroken(blocks[i]))
        blocks[i] = LONG_CODE.sub(lambda code: HYPHENATED.sub(_SPAN, code[0]), block)
    return CELL.sub(_wordy, "".join(blocks))


def _unbroken(html: str) -> str:
    parts = TAG.split(html)
    parts[::2] = [UNBROKEN.sub(_SPAN, part) for part in parts[::2]]
    return "".join(parts)


def _wordy(cell: re.Match[str]) -> str:
    tag, text = cell[0].split(">", 1)
    wordy = len(TAG.sub("", text)) > 24 and tag in ("<td", "<th")
    return f'{tag} class="wordy">{text}' if wordy else cell[0]
