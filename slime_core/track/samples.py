"""Files of readable samples in the run folder: one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Literal

from slime_core.errors import CheckpointError
from slime_core.track.record import write_atomically
from slime_core.types import Sample, SampleRecord
from slime_core.untrusted import as_object, parse_json


class SampleWriter:
    """``folder/train-000003.jsonl`` holds the samples of rollout 3 after it was collected.

    Arguments:
        folder: None: nothing is written.
        num_with_tokens: how many of a file's first rows hold ``tokens``, ``loss_mask`` and ``rollout_log_probs`` too.
    """

    def __init__(self, folder: Path | None, *, num_with_tokens: int = 0) -> None:
        self._folder = folder
        self._num_with_tokens = num_with_tokens

    def write(
        self, name: str, number: int, samples: Sequence[Sample], *, dropped: Sequence[tuple[str, Sample]] = ()
    ) -> Path | None:
        """Write the samples of one rollout or evaluation; replaces the file of an earlier attempt.

        Arguments:
            dropped: samples that are not trained on because a sample transform left them out, with the reason.
        """
        if self._folder is None:
            return None
        path = self._folder / f"{name}-{number:06d}.jsonl"
        lines = []
        for place, (reason, sample) in enumerate(chain(zip(repeat(None), samples), dropped)):
            row = _readable(sample, reason) | (_tokens(sample) if place < self._num_with_tokens else {})
            # A lone surrogate, which JSON allows and UTF-8 does not, is written as a JSON escape.
            lines.append(f"{_as_text(row)}\n".encode("utf-8", "backslashreplace"))
        return write_atomically(path, b"".join(lines))


_as_text = json.JSONEncoder(ensure_ascii=False).encode


def _readable(sample: Sample, dropped: str | None) -> dict[str, object]:
    row: dict[str, object] = {
        "group": sample.group_index,
        "index": sample.index,
        "prompt": sample.prompt,
        "response": sample.response,
        "label": sample.label,
        "reward": sample.reward,
        "status": sample.status.value,
        "response_length": sample.response_length,
        "weight_versions": sample.weight_versions,
        "metadata": sample.metadata,
    }
    # A response of one weight version has one span, which its version describes.
    spans = sample.weight_spans if len(sample.weight_versions) > 1 else None
    marks = {
        "weight_spans": spans,
        "error": sample.error,
        "cause": sample.failure_cause,
        "masked": sample.remove_sample or None,
        "dropped": dropped,
    }
    return row | {name: mark for name, mark in marks.items() if mark is not None}


def _tokens(sample: Sample) -> dict[str, object]:
    """The token ids of prompt and response; of each response token, whether it trains, and the engine's
    log-probability."""
    mask, log_probs = sample.loss_mask, sample.rollout_log_probs
    return {
        "tokens": list(sample.tokens),
        "loss_mask": [1] * sample.response_length if mask is None else list(mask),
        "rollout_log_probs": None if log_probs is None else list(log_probs),
    }


def read_samples(folder: Path, kind: Literal["train", "eval"], number: int) -> Iterator[SampleRecord]:
    """The rows that a run wrote for rollout ``number``, or for the evaluation of its weights, set after set.

    Reads one line at a time; yields nothing if there is no file.
    """
    pattern = f"{kind}-{number:06d}.jsonl" if kind == "train" else f"{kind}-*-{number:06d}.jsonl"
    for path in sorted(folder.glob(pattern)):
        eval_set = None if kind == "train" else path.stem.removeprefix("eval-").removesuffix(f"-{number:06d}")
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                try:
                    yield _record(as_object(parse_json(line)), eval_set)
                except (ValueError, LookupError, TypeError) as problem:
                    raise CheckpointError(
                        f"{path} holds a line that is not a sample ({problem!r}): {line[:80]!r}"
                    ) from None


def _record(row: dict[str, Any], eval_set: str | None) -> SampleRecord:
    values = {entry.name: row[entry.name] for entry in fields(SampleRecord) if entry.name in row}
    return SampleRecord(**{**values, "weight_versions": tuple(row["weight_versions"]), "eval_set": eval_set})
