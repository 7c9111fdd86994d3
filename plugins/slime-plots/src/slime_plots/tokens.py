"""The command ``slime samples``: tokens of samples, coloured by log-probability; untrained tokens are grey."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from slime_core import boundary
from slime_core.errors import DataError

__all__ = ["Tokens", "last_samples", "main", "read_tokens", "shown", "tokenizer_of"]

EPILOG = """examples:
  slime samples outputs/20261122-1                                     the last rollout
  slime samples outputs/a/samples/eval-arithmetic-000010.jsonl --rows 3
  slime samples outputs/a --table                                      one token a line, with id and log-probability

--num-token-samples of the run is the number of samples of a file with tokens.
"""

SCALE = ((-0.1, "green"), (-0.7, "bright_green"), (-2.3, "yellow"), (-4.6, "dark_orange"))
"""Thresholds of log-probability (probabilities 0.9, 0.5, 0.1, 0.01) and the colour above; others are ``LEAST``."""

LEAST, MASKED, PROMPT = "red", "grey50 on grey15", "cyan"
LEGEND = "prompt, p > 0.9, > 0.5, > 0.1, > 0.01, below, not trained"


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of one sample.

    Arguments:
        title: group, index, reward and label.
        prompt: token ids.
        response: for each token its id, whether it is trained, and its log-probability in nats; None if not recorded.
        index: index of the sample in the run.
        versions: weight version that sampled each response token; None if no engine sampled it. Empty: unknown.
    """

    title: str
    prompt: tuple[int, ...]
    response: tuple[tuple[int, bool, float | None], ...]
    index: int = -1
    versions: tuple[str | None, ...] = ()


def main(argv: Sequence[str]) -> int:
    """Print the samples; return the exit code.

    Raises:
        DataError: the file does not exist, or none of its samples has tokens.
    """
    parser = argparse.ArgumentParser(
        prog="slime samples",
        description="The tokens of samples with their log-probabilities.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("path", metavar="RUN|FILE", type=Path, help="folder of a run, or a file of its samples")
    parser.add_argument("--rows", metavar="N", type=int, default=2, help="samples to print [2]")
    parser.add_argument("--table", action="store_true", help="one token a line; always so if there are no colours")
    parser.add_argument("--model", metavar="FOLDER", type=Path, help="of the tokenizer [the run's last checkpoint]")
    options = parser.parse_args(argv)
    file = last_samples(options.path) if options.path.is_dir() else options.path
    tokenizer = tokenizer_of(options.model, file.parent.parent)
    console = Console(highlight=False)
    console.print(str(file), soft_wrap=True)
    console.print(_legend(), soft_wrap=True)
    for sample in list(read_tokens(file))[: options.rows]:
        console.print(Text(sample.title, style="bold"))
        console.print(
            _table(sample, tokenizer) if options.table or not console.color_system else _text(sample, tokenizer)
        )
    return 0


def read_tokens(file: Path) -> Iterator[Tokens]:
    """Yield the samples of ``file`` that have tokens.

    Raises:
        DataError: the file cannot be read, a line is not a sample, or no sample has tokens.
    """
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        samples = [_tokens(row) for row in rows if "tokens" in row]
    except (OSError, ValueError, LookupError, TypeError) as problem:
        raise DataError(
            f"{file} is not a file of samples: {problem!r}. Give one of RUN/samples, or the folder of a run."
        ) from problem
    if not samples:
        raise DataError(f"{file}: none of its {len(rows)} samples holds tokens. Run with --num-token-samples 8.")
    yield from samples


def _tokens(row: dict[str, Any]) -> Tokens:
    length = row["response_length"]
    ids, log_probs = row["tokens"], row["rollout_log_probs"] or [None] * length
    start = len(ids) - length
    title = " ".join(f"{name} {row[name]}" for name in ("group", "index", "reward", "label"))
    response = zip(ids[start:], map(bool, row["loss_mask"]), log_probs, strict=True)
    return Tokens(title, tuple(ids[:start]), tuple(response), row["index"], _versions(row))


def _versions(row: dict[str, Any]) -> tuple[str | None, ...]:
    """Return the version of each response token; a response of one version has no spans in the file."""
    named, length = row.get("weight_versions") or [], row["response_length"]
    spans = row.get("weight_spans") or ([(named[0], 0, length)] if len(named) == 1 else [])
    versions: list[str | None] = [None for _ in range(length)] if spans else []
    for version, start, end in spans:
        versions[start:end] = [str(version)] * (end - start)
    return tuple(versions)


def last_samples(run: Path) -> Path:
    """Return the file of the last rollout, or of an evaluation if there is no rollout.

    Raises:
        DataError: the run has no samples.
    """
    files = sorted((run / "samples").glob("train-*.jsonl")) or sorted((run / "samples").glob("eval-*.jsonl"))
    if not files:
        raise DataError(f"{run} has no samples/*.jsonl. Give the folder of a run, or a file of samples.")
    return files[-1]


def tokenizer_of(model: Path | None, run: Path) -> Tokenizer | None:
    """Load the tokenizer of ``model``, or of the last checkpoint of ``run``; None if there is none, so ids are printed.

    Raises:
        DataError: ``model`` has no tokenizer.json that can be read.
    """
    folders = [model] if model is not None else sorted(run.glob("checkpoints/step-*/hf"))
    file = folders[-1] / "tokenizer.json" if folders else None
    if file is None or (model is None and not file.is_file()):
        return None
    with boundary(file, "reading it", error=DataError, next_step="Give a model's folder with --model."):
        return Tokenizer.from_file(str(file))


def shown(token: int, tokenizer: Tokenizer | None) -> str:
    """Return the token's text, or its id if there is no tokenizer."""
    text = str(token) if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)
    return text.replace("\n", "\u21b5") if tokenizer is not None else f"{text} "


def _style(trains: bool, log_prob: float | None) -> str:
    if not trains:
        return MASKED
    return next((colour for least, colour in SCALE if log_prob is None or log_prob >= least), LEAST)


def _legend() -> Text:
    colours = (PROMPT, *(colour for _, colour in SCALE), LEAST, MASKED)
    parts = ((name, colour) for name, colour in zip(LEGEND.split(", "), colours, strict=True))
    return Text("  ").join(Text(name, style=colour) for name, colour in parts)


def _text(sample: Tokens, tokenizer: Tokenizer | None) -> Text:
    text = Text("".join(shown(token, tokenizer) for token in sample.prompt), style=PROMPT)
    for token, trains, log_prob in sample.response:
        text.append(shown(token, tokenizer), style=_style(trains, log_prob))
    return text


def _table(sample: Tokens, tokenizer: Tokenizer | None) -> Table:
    table = Table("", "id", "token", "trains", "log-prob", box=None)
    for place, token in enumerate(sample.prompt):
        table.add_row(str(place), str(token), Text(shown(token, tokenizer), style=PROMPT), "prompt", "")
    for place, (token, trains, log_prob) in enumerate(sample.response, start=len(sample.prompt)):
        style, number = _style(trains, log_prob), "" if log_prob is None else f"{log_prob:.4f}"
        table.add_row(str(place), str(token), Text(shown(token, tokenizer), style=style), str(int(trains)), number)
    return table
