"""``docs/hooks.md`` and ``docs/settings.md`` say what the code says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from docs.reference import hooks_page, settings_page
from slime_core.plugins import contracts, hooks
from slime_core.plugins.component import Kind

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize(("name", "page"), [("hooks.md", hooks_page), ("settings.md", settings_page)])
def test_a_generated_page_is_the_one_that_the_code_makes(name: str, page: Callable[[], str]) -> None:
    again = "python -m docs.reference docs/hooks.md docs/settings.md"
    assert (DOCS / name).read_text(encoding="utf-8") == page(), f"the code has changed; run {again}"


def test_the_page_holds_every_hook_every_kind_and_every_contract() -> None:
    text = hooks_page()
    assert [name for name in hooks.HOOKS if f"`{name}(" not in text] == []
    assert [kind for kind in Kind if f"### {kind.words}\n" not in text] == []
    assert [name for name in contracts.__all__ if f"### {name}\n" not in text] == []
