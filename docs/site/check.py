"""Check the built site: python docs/site/check.py build/docs

Every relative link and picture leads to a file, every anchor to an element, nothing is loaded from another host, and
every entry of the reference says something.
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ENTRY = re.compile(
    r'<h\d id="([^"]+)" class="doc doc-heading">.*?<div class="doc doc-contents[^>]*>(.*?)</div>', re.DOTALL
)


class Page(HTMLParser):
    """The ids of a page, and what it links to and loads."""

    def __init__(self, text: str):
        super().__init__()
        self.ids, self.links, self.loads = set[str](), list[str](), list[str]()
        self.empty = [name for name, contents in ENTRY.findall(text) if not re.sub("<[^>]*>", "", contents).strip()]
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") != "canonical":
            self.loads.append(given["href"])
        elif tag in ("img", "script", "iframe") and "src" in given:
            self.loads.append(given["src"])


def faults(site: Path) -> list[str]:
    pages = {path.resolve(): Page(path.read_text("utf-8")) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        shown = path.relative_to(site.resolve())
        found += [f"{shown} loads {url} from another host" for url in page.loads if urlsplit(url).netloc]
        found += [f"{shown} has {name} without a docstring" for name in page.empty]
        for url in page.links + page.loads:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc or shown.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                found.append(f"{shown} links to {url}, which is not there")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
                found.append(f"{shown} links to {url}, which has no such anchor")
    if not pages:
        found.append(f"{site} has no pages")
    return found


if __name__ == "__main__":
    wrong = faults(Path(sys.argv[1]))
    sys.exit("\n".join(wrong) or None)
