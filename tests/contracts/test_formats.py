"""Our own prompt formats, held to the contract by the kit that plugin authors use."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from slime_testing import PromptFormatSuite


def lines(suite: PromptFormatSuite, path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class TestJsonLines(PromptFormatSuite):
    component = "jsonl"
    write = lines


class TestNewlineDelimited(PromptFormatSuite):
    component = "ndjson"
    write = lines
