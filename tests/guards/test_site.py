"""The documentation site: its menu, and the pages that ``make docs`` gathers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.website import LINK, ROOT, gather, on_page_content


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("site")
    gather(folder)
    return folder


def menu(items: list[Any]) -> Iterator[str]:
    for item in items:
        if isinstance(item, str):
            yield item
        else:
            (target,) = item.values()
            yield from menu(target) if isinstance(target, list) else [target]


def test_every_page_of_the_menu_is_gathered(site: Path) -> None:
    named = list(menu(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert [name for name in named if not (site / name).is_file()] == []
    assert len(named) == len(set(named))


def test_every_guide_is_in_the_menu(site: Path) -> None:
    named = set(menu(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    guides = {path.relative_to(site).as_posix() for path in (site / "docs").glob("*.md")}
    assert guides - named == set()


def test_every_link_leads_to_a_gathered_file(site: Path) -> None:
    broken = [
        (page.relative_to(site).as_posix(), link)
        for page in site.rglob("*.md")
        for link in LINK.findall(re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE))
        if not (page.parent / link).is_file()
    ]
    assert broken == []


@pytest.mark.parametrize(
    ("html", "shown"),
    [
        (":class:<code>~slime_core.types.Sample</code>", "<code>Sample</code>"),
        (":mod:<code>slime_core.types</code>", "<code>slime_core.types</code>"),
        (r"<code>auto\|cpu</code>", "<code>auto|cpu</code>"),
    ],
)
def test_marks_of_other_tools_are_not_shown(html: str, shown: str) -> None:
    assert on_page_content(html) == shown
