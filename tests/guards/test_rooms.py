from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import slime_core

CORE = Path(slime_core.__file__).parent


def _files(room: Path) -> set[str]:
    rooms = {one.name for one in room.iterdir() if any(one.glob("*.py"))}
    return {one.stem for one in room.glob("*.py")} - {"__init__", "__main__"} | rooms


def _listed(room: Path) -> tuple[str, set[str]]:
    """The docstring of ``room``, and which of its files start a line of it."""
    text = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    return text, {found[1] for found in re.finditer(r"^ *(\w+)", text, re.MULTILINE)} & _files(room)


LISTING = [str(path.parent.relative_to(CORE)) for path in CORE.rglob("__init__.py") if len(_listed(path.parent)[1]) > 1]


@pytest.mark.parametrize("name", sorted(LISTING))
def test_a_room_that_lists_its_files_lists_all_of_them(name: str):
    text, _ = _listed(CORE / name)
    assert {one for one in _files(CORE / name) if not re.search(rf"\b{one}\b", text)} == set()


def test_most_rooms_list_their_files():
    assert {"cli", "config", "learner", "plugins", "prompts", "rollout", "weights"} <= set(LISTING)
