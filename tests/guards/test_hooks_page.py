"""``docs/hooks.md`` says what the code says."""

from __future__ import annotations

from pathlib import Path

from slime_core.plugins import contracts, hooks
from slime_core.plugins.component import Kind
from slime_core.plugins.reference import page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "hooks.md"


def test_the_page_of_hooks_is_the_one_that_the_code_makes() -> None:
    again = "python -m slime_core.plugins.reference docs/hooks.md"
    assert PAGE.read_text(encoding="utf-8") == page(), f"the hooks have changed; run {again}"


def test_the_page_holds_every_hook_every_kind_and_every_contract() -> None:
    text = page()
    named = [name for name in hooks.__all__ if name.startswith("slime_")]
    assert [name for name in named if f"`{name}(" not in text] == []
    assert [kind for kind in Kind if f"### {kind.words}\n" not in text] == []
    assert [name for name in contracts.__all__ if f"### {name}\n" not in text] == []
