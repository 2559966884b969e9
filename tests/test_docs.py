"""The documentation: what the tutorial says to write runs, and no link of the site that `make docs` builds is dead."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import torch

from tests.processes import run_ranks

DOCS = Path(__file__).parents[1] / "examples" / "docs"
BLOCKS = re.findall(r'^```python(?: title="([^"]*)")?\n(.*?)^```', (DOCS / "tutorial.md").read_text(), re.M | re.S)
FILES = {name: text for name, text in BLOCKS if name}


def written(folder: Path) -> None:
    """Writes the files of the tutorial."""
    for name, text in FILES.items():
        (folder / name).write_text(text)


def run_file(folder: str, name: str) -> None:
    """On a rank: a file of the tutorial, as torchrun starts it."""
    os.chdir(folder)
    ranks = str(torch.distributed.get_world_size())
    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    sys.path.insert(0, folder)
    runpy.run_path(name, run_name="__main__")


def test_the_code_of_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(FILES) == ["train.py", "loop.py", "accelerate_loop.py"] and len(BLOCKS) == 6
    written(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    exec("".join(text for name, text in BLOCKS if not name), {})
    assert run_ranks(run_file, 4, str(tmp_path), "loop.py") == [None] * 4 and any(Path("saved").glob("step-*10"))


def test_the_loop_with_accelerate_runs(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="pip install sbpc[integrations]")
    written(tmp_path)
    assert run_ranks(run_file, 2, str(tmp_path), "accelerate_loop.py") == [None] * 2
    assert any((tmp_path / "saved").glob("step-*1"))


class Page(HTMLParser):
    """The links of a page, and the places in it that links may name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            if name in ("id", "name") and value:
                self.places.add(value)


def dead(folder: Path) -> list[str]:
    """The links to files and places that a site does not have."""
    pages = {path: Page(path.read_text()) for path in folder.rglob("*.html")}
    found = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            known = there.is_file() and (there not in pages or unquote(parts.fragment) in pages[there].places)
            if not parts.scheme and not known:
                found.append(f"{path.relative_to(folder)}: {link}")
    return found


@pytest.mark.prove
def test_no_link_of_the_site_is_dead_and_no_page_loads_from_other_hosts(tmp_path: Path) -> None:
    pytest.importorskip(
        "material", reason="what builds the site is not installed: pip install 'sbpc[docs]', or make docs"
    )
    subprocess.run([sys.executable, str(DOCS / "build.py"), str(tmp_path / "site")], check=True, timeout=300)
    site = tmp_path / "site"
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40 and dead(site) == []
    assert not [
        page for page in pages if re.search(r'<(script|img|link|iframe)[^>]*(src|href)="(https?:)?//', page.read_text())
    ]
    (site / "index.html").write_text((site / "index.html").read_text().replace('href="how_to.html"', 'href="how.html"'))
    (site / "tutorial.html").write_text(re.sub("id=.2-plan-it", "id='other", (site / "tutorial.html").read_text()))
    assert {link.partition(": ")[2] for link in dead(site)} >= {"how.html"} and len(dead(site)) > 1
