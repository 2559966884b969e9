"""Builds the documentation site of README, docstrings, examples and lists of tests, by mkdocs-material: `make docs`.

What a page says stands elsewhere, and is run by tests there; only the tutorial is text of its own. Pages load nothing
from other hosts.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from api_pages import api_pages, command_page, linked

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
EXTENSIONS = ["admonition", "attr_list", "def_list", "tables", "toc", "pymdownx.details", "pymdownx.superfences"]
THEME = {
    "name": "material",
    "font": False,  # it would come from another host
    "features": ["content.code.copy", "navigation.indexes", "navigation.sections", "navigation.top", "toc.follow"],
    "palette": [
        {"media": f"(prefers-color-scheme: {mode})", "scheme": scheme, "primary": "indigo"}
        for mode, scheme in (("light", "default"), ("dark", "slate"))
    ],
}
STYLE = """.md-grid {max-width: 72rem} .md-typeset table:not([class]) {display: table; font-size: .66rem}
.md-typeset dd {margin-top: .2em; margin-bottom: .6em} .md-typeset dt {font-family: var(--md-code-font-family)}
.md-typeset pre > code {font-size: .6rem} .md-typeset h2 {margin-top: 1.2em}
.md-typeset h3 code {white-space: pre-wrap}
"""


class Site:
    """The pages by their file, and the files of the repository that they link to."""

    def __init__(self) -> None:
        self.pages: dict[str, str] = {}
        self.assets: dict[str, bytes] = {}
        self.sources: list[str] = []

    def add(self, page: str, text: str, home: str = "") -> str:
        """Takes a page whose relative links are seen from folder `home` of the repository."""
        up = "../" * page.count("/")

        def link(found: re.Match[str]) -> str:
            path = os.path.normpath(os.path.join(home, found[1]))
            if path.endswith((".svg", ".html")):
                self.assets.setdefault(path, (ROOT / path).read_bytes() if (ROOT / path).exists() else b"")
                return f"]({up}{path})"
            if path not in self.sources:
                self.sources.append(path)
            return f"]({up}{source_page(path)})"

        text = re.sub(r"\]\((?!https?:|#|site:)([^)\s]+)\)", link, blank_lines(text))
        self.pages[page] = re.sub(r"\]\(site:([^)]+)\)", rf"]({up}\1)", text)
        return page


def main(out: Path) -> None:
    """Builds the site into a folder, anew."""
    site = Site()
    navigation: list[Any] = [
        {"Overview": site.add("index.md", README)},
        {"Tutorial": site.add("tutorial.md", (Path(__file__).parent / "tutorial.md").read_text(), "examples/docs")},
        {"How to": site.add("how_to.md", how_to(site))},
        {"What does not work": site.add("limits.md", limits())},
        {"API": [{title: site.add(f"api/{name}.md", text)} for name, (title, text) in api_pages().items()]},
        {"Command line": site.add("command_line.md", command_page())},
    ]
    files = sorted([*(ROOT / "examples").glob("*.py"), *(ROOT / "examples/clusters").iterdir()])
    site.sources = [*(str(path.relative_to(ROOT)) for path in files), *site.sources]
    for path in site.sources:  # grows: a folder's page may link to others
        site.add(source_page(path), source(ROOT / path), path)
    shown = {str(path.relative_to(ROOT)): path.name for path in files}
    navigation.append({"Examples": [{title: source_page(path)} for path, title in shown.items()]})
    with tempfile.TemporaryDirectory() as folder:
        docs = Path(folder, "docs")
        for name, text in {**site.pages, "style.css": STYLE}.items():
            (docs / name).parent.mkdir(parents=True, exist_ok=True)
            (docs / name).write_text(text)
        for name, content in site.assets.items():
            (docs / name).parent.mkdir(parents=True, exist_ok=True)
            (docs / name).write_bytes(content)
        about = {
            "site_name": "sbpc",
            "theme": THEME,
            "nav": navigation,
            "extra_css": ["style.css"],
            "plugins": ["search"],
        }
        about |= {"validation": {"links": dict.fromkeys(("anchors", "absolute_links", "unrecognized_links"), "warn")}}
        about |= {
            "use_directory_urls": False,
            "markdown_extensions": [*EXTENSIONS, {"pymdownx.highlight": {"use_pygments": True}}],
        }
        Path(folder, "mkdocs.yml").write_text(yaml.safe_dump(about | {"site_url": ""}, sort_keys=False))
        shutil.rmtree(out, ignore_errors=True)
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out.resolve())]
        subprocess.run(command, cwd=folder, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    (out / "404.html").unlink()  # a server's, whose links begin at its root
    print(f"the documentation is in {out}/index.html; its search wants a server: python3 -m http.server -d {out}")


def blank_lines(text: str) -> str:
    """Puts an empty line before lists, tables and fences, which this kind of Markdown wants and GitHub's does not."""
    lines, fenced = [""], False
    for line in text.splitlines():
        starts = re.match(r"- |\| |```|!\[", line) and not fenced
        goes_on = lines[-1].startswith((line[:1], "  "))
        if starts and lines[-1] and not goes_on:
            lines.append("")
        fenced ^= line.lstrip().startswith("```")
        lines.append(line)
    return "\n".join(lines[1:]) + "\n"


def source_page(path: str) -> str:
    return f"source/{path.replace('/', '.')}.md"


def source(path: Path) -> str:
    """Returns the page of a file, or of a folder: what its files are for."""
    name = path.relative_to(ROOT)
    if path.is_dir():
        pages = [each for each in path.iterdir() if each.suffix in (".sh", ".yaml") or (each / "__init__.py").exists()]
        text = f"# {name}\n\n" + "".join(f"- [{each.name}]({each.name})\n" for each in sorted(pages)) + "\n"
        for file in sorted(path.glob("*.py"), key=lambda file: (file.name != "__init__.py", file.name)):
            title = f"[{file.name}]({file.name})" if path.name == "examples" else f"`{file.name}`"
            if doc := ast.get_docstring(ast.parse(file.read_text())):
                first = " ".join(doc.partition("\n\n")[0].split())
                text += f"{title}\n:   {first}\n\n"
        return text
    text, language = path.read_text(), {".py": "python", ".sh": "bash", ".yaml": "yaml"}.get(path.suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n# {name}\n\n````{language}\n{text}````\n"


def rows(heading: str) -> list[list[str]]:
    """Returns the cells of the table below a heading of the README."""
    section = README.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def how_to(site: Site) -> str:
    """Returns what to write for each row of the README's table, with what the quick start's plan then shows."""
    quick_start = README.partition("## Quick start\n```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    pages = [
        "# How to\n\nAfter the [quick start](site:index.md#quick-start), with its `model`, `args`, `mesh` and `plan`.\n"
    ]
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        with contextlib.redirect_stdout(io.StringIO()):
            exec(quick_start, names)
        for task, code in rows("What it does"):
            cut = re.search("[:;] ", task) if len(task) > 70 else None
            title, rest = (task[: cut.start()], task[cut.end() :]) if cut else (task, "")
            aside = re.search(r" \((\[.*?\]\(.*?\))\)", title)
            title, rest = (title.replace(aside[0], ""), f"{rest}; {aside[1]}") if aside else (title, rest)
            pages += [f"## {sentence(title)}\n", f"{sentence(rest)}.\n" if rest else ""]
            lines = re.match("(`[^`]+`(, )?)*", code)[0]
            for line in re.findall("`([^`]+)`", lines):
                pages.append(
                    f"```{'bash' if line.startswith('sbpc ') else 'python'}\n{line}\n```\n{shown(line, names)}"
                )
            if remark := code[len(lines) :].strip("; "):
                pages.append(f"{sentence(remark)}.\n")
            commands = dict.fromkeys(re.findall(r"`sbpc (\w+)", lines))
            about = [linked(f"`sbpc.{name}`") for name in dict.fromkeys(re.findall(r"sbpc\.(\w+)\(", lines))]
            about += [f"[`sbpc {name}`](site:command_line.md#sbpc-{name})" for name in commands]
            pages.append(f"See {', '.join(about)}.\n" if about else "")
        site.assets["plan.html"] = Path("plan.html").read_bytes()
        os.chdir(here)
    pages.insert(
        1, "The page, trace and graph that some of these write look like this: [the page of the plan](plan.html).\n"
    )
    return "\n".join(pages)


def sentence(text: str) -> str:
    """Returns a text with a capital letter, if it begins with a word of English."""
    return text[0].upper() + text[1:] if re.match(r"[a-z]+[ ,;]", text) else text


def shown(line: str, names: dict[str, Any]) -> str:
    """Returns a block of what a line of Python prints or gives, if it is short and needs nothing besides the plan."""
    if not line.startswith(("print(", "plan.", "sbpc.baseline(", "sbpc.sweep(")) or re.search(
        "mylib|load_module", line
    ):
        return ""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            value = eval(line, names)
        except SyntaxError:
            value = exec(line, names)
    values = [str(each) for each in (value if isinstance(value, tuple) else (value,)) if each is not None]
    text = printed.getvalue() or "\n".join(each for each in values if len(each) < 400)
    return f"\n```text\n{text.rstrip()}\n```\n" if text else ""


def limits() -> str:
    """Returns what does not work, and why: of the README, and of the lists that tests hold to."""
    parts = ["# What works, and what does not yet\n", README.partition("## What works, and what does not yet\n")[2]]
    parts.append("## Signatures that rules leave out\n\nAll others that are right are allowed: tests look for them.\n")
    for reason, block in re.findall(
        r"^((?:# .*\n)+)((?:(?!#).*\n)+)", (ROOT / "tests/lacking.txt").read_text(), re.MULTILINE
    ):
        why = " ".join(line.lstrip("# ") for line in reason.splitlines())
        lines = "".join(f"    {line}\n" for line in block.splitlines())
        parts.append(f'{why}\n\n??? note "Signatures: {len(block.splitlines())}"\n    ```text\n{lines}    ```\n')
    return "\n".join(parts)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
