"""Gathers the pages of the documentation site (``python -m docs.website FOLDER``), and mends them as a hook of mkdocs.

The pages keep their places in the repository, so their links hold. Files that pages link to are copied with them; a
link to a folder becomes one to its README.md.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PUBLIC = (
    *("slime_core", "slime_core.types", "slime_core.contracts", "slime_core.errors", "slime_core.generation"),
    *("slime_core.ops", "slime_core.modeling", "slime_core.prompts", "slime_core.services", "slime_core.provisional"),
    *("slime_core.weights", "slime_core.checkpoint"),
)
"""Packages that plugins may import."""

FENCE = re.compile(r"^(```\w+) .*$", re.MULTILINE)
"""The start of a block of code with marks for tests, which mkdocs does not read."""

ROLE = re.compile(r":(?:mod|class|func|meth|data|attr):<code>(?:~[\w.]*\.|~)?([\w.()]+)</code>")
"""A role of Sphinx in a docstring; ``~`` shows the last part of the name alone."""

LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)#\s]+)")


def pages() -> list[Path]:
    """Return every page in the repository, relative to its root."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in listed.splitlines() if not name.startswith((".github/", "tests/"))]


def gather(folder: Path) -> None:
    """Write all pages, the files that they link to, and the page of the Python reference into ``folder``."""
    for page in pages():
        text = (ROOT / page).read_text(encoding="utf-8")
        for target in linked_files(page, text):
            _copy(target, folder)
        destination = folder / page
        destination.parent.mkdir(parents=True, exist_ok=True)
        destination.write_text(_for_site(page, text), encoding="utf-8")
    (folder / "reference.md").write_text(reference_page(), encoding="utf-8")


def linked_files(page: Path, text: str) -> Iterator[Path]:
    """Yield the files other than pages to which ``page`` links, relative to the root."""
    for link in LINK.findall(text):
        target = (ROOT / page.parent / link).resolve()
        if target.is_file() and target.suffix != ".md":
            yield target.relative_to(ROOT)


def reference_page() -> str:
    """Return the page that mkdocstrings fills with the public packages."""
    return "# Python reference\n\n" + "\n".join(f"::: {name}\n" for name in PUBLIC)


def on_page_content(html: str, **_: object) -> str:
    """Return the page with Sphinx's roles as plain code, and without the backslashes of ``|`` in tables (mkdocs)."""
    return ROLE.sub(r"<code>\1</code>", html).replace("\\|", "|")


def _for_site(page: Path, text: str) -> str:
    return LINK.sub(lambda link: _page_of(page, link[1]), FENCE.sub(r"\1", text))


def _page_of(page: Path, link: str) -> str:
    return f"{link.rstrip('/')}/README.md" if (ROOT / page.parent / link / "README.md").is_file() else link


def _copy(file: Path, folder: Path) -> None:
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / file, folder / file)


if __name__ == "__main__":
    gather(Path(sys.argv[1]))
