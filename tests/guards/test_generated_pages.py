"""``docs/hooks.md`` and ``docs/settings.md`` say what the code says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from docs.reference import hooks_page, settings_page
from slime_core import contracts
from slime_core.plugins import hooks
from slime_core.plugins.registration import Kind

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize(("name", "page"), [("hooks.md", hooks_page), ("settings.md", settings_page)])
def test_a_generated_page_is_the_one_that_the_code_makes(name: str, page: Callable[[], str]) -> None:
    again = "python -m docs.reference docs/hooks.md docs/settings.md"
    assert (DOCS / name).read_text(encoding="utf-8") == page(), f"the code has changed; run {again}"


def test_the_page_holds_every_hook_every_kind_and_every_contract() -> None:
    text = hooks_page()
    assert [name for name in hooks.HOOKS if f"{name}(" not in text] == []
    assert [kind for kind in Kind if f"- `{kind}(" not in text] == []
    assert [name for name in contracts.__all__ if f"### {name}\n" not in text] == []


def test_every_provisional_hook_has_its_row_with_who_uses_it() -> None:
    rows = (DOCS / "provisional-hooks.md").read_text(encoding="utf-8")
    provisional = [name for name in hooks.HOOKS if not hooks.HOOKS[name].is_stable]
    for name in provisional:
        (row,) = [line for line in rows.splitlines() if line.startswith(f"| `{name}(")]
        for user in row.rstrip("| ").rpartition("| ")[2].split(", "):
            sources = DOCS.parent.glob(f"*/**/{user}/src/**/*.py")
            assert any(f"def {name}(" in path.read_text(encoding="utf-8") for path in sources), f"{user}: {name}"
