"""Count the labels that do not score against themselves: rows that no response can solve.

    python -m bench.label_counts test.jsonl minerva/ --label-key answer --rm-type boxed_math

Prints one line per file and the first such labels, and how many labels equal their text only, because they are words or
no expression that can be read. Reads JSON Lines, JSON lists and Parquet. ``--after '####'`` takes
the label from the text after the last mark, as GSM8K writes it. See docs/rewards.md for the counts of public sets.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime_core.types import Sample
from slime_rewards.expressions import read
from slime_rewards.mathematics import BoxedMathematics, Dapo, DeepScaleR, Mathematics
from slime_rewards.notation import is_text

RULES: dict[str, Any] = {
    "math": Mathematics,
    "boxed_math": BoxedMathematics,
    "deepscaler": DeepScaleR,
    "dapo": Dapo,
}
"""Reward model -> its class."""


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of one file."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        yield from pyarrow.parquet.read_table(path).to_pylist()
    elif path.suffix == ".json":
        yield from json.loads(path.read_text(encoding="utf-8"))
    else:
        yield from (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip())


async def unmatched(labels: list[str], rm_type: str) -> list[str]:
    """Return the labels that get less than full marks from ``rm_type`` as their own answer."""
    rule = RULES[rm_type]
    samples = [Sample(label=label, response=rule.perfect_response(label)) for label in labels]
    rewards = await rule().score(samples)
    numbers = [reward["score"] if isinstance(reward, dict) else reward for reward in rewards]
    return [label for label, number in zip(labels, numbers, strict=True) if number < 1]


def main() -> None:
    """Print the counts of every file."""
    arguments = argparse.ArgumentParser(description="Count the labels that do not score against themselves.")
    arguments.add_argument("paths", nargs="+", type=Path, help="files, or folders of them")
    arguments.add_argument("--label-key", default="answer", help="field of a row with its label")
    arguments.add_argument("--rm-type", choices=RULES, default="boxed_math")
    arguments.add_argument("--after", help="the label is the text after the last of these marks")
    options = arguments.parse_args()
    for path in options.paths:
        files = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
        for file in (one for one in files if one.suffix in {".jsonl", ".json", ".parquet"}):
            labels = [str(row[options.label_key]) for row in rows(file)]
            if options.after:
                labels = [label.rpartition(options.after)[2].strip() for label in labels]
            failed = asyncio.run(unmatched(labels, options.rm_type))
            texts = sum(is_text(label) or not read(label) for label in labels)
            print(
                f"{file}: {len(failed)} of {len(labels)} labels do not score against themselves, {texts} are text only"
            )
            for label in failed[:20]:
                print(f"    {label!r}")


if __name__ == "__main__":
    main()
