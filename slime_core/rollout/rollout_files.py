"""Rollouts on disk, to be trained again: one file a rollout, JSON Lines, written whole or not at all.

    {"format": "slime rollout", "version": 1, "rollout": 3, "temperature": 1.0, "trained": 2, "samples": 3, ...}
    {"group_index": 6, "index": 12, "tokens": [5, 14, 5, 7, 1], "rollout_log_probs": [-0.25, -0.5], ...}
    ...

The first line says what the file is, every other is :meth:`~slime_core.types.Sample.to_dict` of one sample. The first
``trained`` of them are trained on, in this order, siblings side by side; the others were aborted or failed. Numbers
come back bit for bit, since JSON writes enough digits of each. Reading runs nothing of what a file holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from slime_core.errors import DataError, RunError
from slime_core.opaque import as_json, from_json
from slime_core.track.record import write_atomically
from slime_core.types import JsonValue, PromptGroup, Sample
from slime_core.untrusted import open_regular

FORMAT = "slime rollout"
VERSION = 1

PICKLED = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""First bytes of files that torch.save or pickle wrote."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One rollout as it was recorded.

    Arguments:
        rollout: its number.
        temperature: that it was sampled at.
        trained: samples that are trained on.
        lost: samples that were aborted or failed.
        cursor: where the data source stood after it.
    """

    rollout: int
    temperature: float
    trained: list[Sample]
    lost: list[Sample] = field(default_factory=list)
    cursor: dict[str, JsonValue] = field(default_factory=dict)

    @property
    def groups(self) -> list[PromptGroup]:
        """The trained samples by prompt group, in order."""
        return _runs(self.trained)

    @property
    def lost_groups(self) -> list[PromptGroup]:
        """The others by prompt group."""
        return _runs(self.lost)

    def subsampled(self, share: float | None) -> Recorded:
        """The same with the first ``share`` of its prompt groups, at least one; None: itself."""
        if share is None:
            return self
        groups = self.groups
        kept = groups[: max(1, round(share * len(groups)))]
        samples = [sample for group in kept for sample in group]
        return Recorded(self.rollout, self.temperature, samples, [], self.cursor)


def rollout_file(template: Path, rollout: int) -> Path:
    """The file of one rollout; ``{rollout_id}`` stands for its number: ``debug/{rollout_id}.jsonl`` is
    ``debug/3.jsonl``."""
    return Path(f"{template}".replace("{rollout_id}", f"{rollout}"))


def _runs(samples: Sequence[Sample]) -> list[PromptGroup]:
    return [list(group) for _, group in groupby(samples, key=lambda sample: sample.group_index)]


# --- Writing ----------------------------------------------------------------------------------------------------------


def write_rollout(path: Path, recorded: Recorded) -> Path:
    """``path`` holds ``recorded``, or what it held before, never a part.

    Raises:
        RunError: a sample holds something that JSON has no words for; names the sample and the field.
    """
    samples = [*recorded.trained, *recorded.lost]
    header = {
        "format": FORMAT,
        "version": VERSION,
        "rollout": recorded.rollout,
        "temperature": recorded.temperature,
        "trained": len(recorded.trained),
        "samples": len(samples),
        "cursor": recorded.cursor,
    }
    lines = [json.dumps(header, default=_packed), *map(_line, samples)]
    return write_atomically(path, "".join(f"{line}\n" for line in lines))


def _line(sample: Sample) -> str:
    parts = []
    for name, value in sample.to_dict().items():
        try:
            parts.append(f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False, default=_packed)}")
        except (TypeError, ValueError) as problem:
            raise RunError(
                f"sample {sample.index}: its {name} cannot be saved as JSON: {problem}. Keep numbers, text, lists, "
                "tables and NumPy arrays of numbers in samples, or leave --save-debug-rollout-data out."
            ) from None
    return f"{{{', '.join(parts)}}}"


def _packed(value: Any) -> Any:
    import numpy as np

    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return as_json(value)
    raise TypeError(f"a {type(value).__name__}")


# --- Reading ----------------------------------------------------------------------------------------------------------


def read_rollout(path: Path) -> Recorded:
    """The rollout in ``path``.

    Raises:
        DataError: the file is missing or malformed; names the line.
    """
    lines = _lines(path)
    header = _header(path, next(lines, b""))
    samples = [_sample(path, number, line) for number, line in enumerate(lines, start=2)]
    expected, trained = header["samples"], header["trained"]
    if len(samples) != expected or not 0 <= trained <= expected:
        raise DataError(
            f"{path}, line 1: it announces {expected} samples, {trained} of them trained, and {len(samples)} follow, "
            "so the file was cut or added to; save the rollout again"
        )
    for number, sample in enumerate(samples[:trained], start=2):
        _refuse_untrainable(path, number, sample)
    return Recorded(header["rollout"], header["temperature"], samples[:trained], samples[trained:], header["cursor"])


def read_numbered(template: Path, rollout: int) -> Recorded:
    """The rollout of that number, from its :func:`rollout_file`.

    Raises:
        DataError: its file is missing, malformed, or another rollout's.
    """
    path = rollout_file(template, rollout)
    found = read_rollout(path)
    if path != template and found.rollout != rollout:
        raise DataError(
            f"{path}, line 1: this is rollout {found.rollout}, and its name says {rollout}; give the files their "
            "names back, or name this one file alone with --load-debug-rollout-data"
        )
    return found


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with open_regular(path) as file:
            if file.read(4).startswith(PICKLED):
                raise DataError(
                    f"{path} was written by torch.save or pickle, as slime's debug files are, and reading it would run "
                    "whatever its writer put into it; accepted: JSON Lines as --save-debug-rollout-data writes them"
                )
            file.seek(0)
            yield from file
    except OSError as problem:
        raise DataError(f"{path} cannot be read: {problem.strerror}; accepted: a saved rollout") from problem


def _header(path: Path, line: bytes) -> dict[str, Any]:
    found = _object(path, 1, line)
    if found.get("format") != FORMAT or found.get("version") != VERSION:
        shown = f"format {found.get('format')!r}, version {found.get('version')!r}"
        raise DataError(
            f"{path}, line 1: {shown}; accepted: a rollout as --save-debug-rollout-data writes it, format "
            f"{FORMAT!r}, version {VERSION}"
        )
    kinds = {"rollout": int, "temperature": float, "trained": int, "samples": int, "cursor": dict}
    wrong = [name for name, kind in kinds.items() if not isinstance(found.get(name), kind)]
    if wrong:
        raise DataError(f"{path}, line 1: {', '.join(wrong)} is missing or of another kind; save the rollout again")
    return found


def _sample(path: Path, number: int, line: bytes) -> Sample:
    values = _object(path, number, line)
    try:
        return Sample.from_dict(values)
    except (TypeError, ValueError, OverflowError) as problem:
        raise DataError(f"{path}, line {number}: no sample: {problem}; save the rollout again") from None


def _refuse_untrainable(path: Path, number: int, sample: Sample) -> None:
    length, sampled = sample.response_length, len(sample.rollout_log_probs or ())
    wrong = ""
    if sample.reward is None:
        wrong = "no reward"
    elif not 0 < length < len(sample.tokens):
        wrong = f"response_length = {length} of {len(sample.tokens)} tokens, prompt included"
    elif sampled != length:
        wrong = f"{sampled} rollout_log_probs for {length} response tokens"
    if wrong:
        raise DataError(
            f"{path}, line {number}: {wrong}; a sample that is trained on has a reward, a prompt, a response and a "
            "log-probability of each of its tokens"
        )


def _object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line, object_hook=from_json)
    except (ValueError, TypeError, RecursionError) as problem:
        raise DataError(f"{path}, line {number}: no JSON: {problem}; save the rollout again") from None
    if not isinstance(found, dict):
        raise DataError(f"{path}, line {number}: a {type(found).__name__}, not an object; save the rollout again")
    return found


MOST_BYTES = 256 * 2**20
"""Bytes of files that are checked before the run starts, in about three seconds; later files are checked when read."""


def screen_rollouts(template: Path, rollouts: range, *, temperature: float, vocab_size: int | None) -> None:
    """Check the files of ``rollouts`` before a run trains them.

    Arguments:
        template: see :func:`rollout_file`.
        temperature: the run divides logits by it.
        vocab_size: of the model; None: unknown.

    Raises:
        DataError: files are missing or malformed, were sampled at another temperature, or hold tokens that the model
            does not have; names file and line.
    """
    _refuse_missing(template, rollouts)
    left = MOST_BYTES
    for rollout in rollouts:
        path = rollout_file(template, rollout)
        left -= path.stat().st_size
        if left < 0 and rollout != rollouts[0]:
            return
        found = read_numbered(template, rollout)
        if found.temperature != temperature:
            raise DataError(
                f"{path}, line 1: sampled at temperature {found.temperature:g}, and rollout_temperature = "
                f"{temperature:g} would divide the learner's logits by another number; add --rollout-temperature "
                f"{found.temperature:g}"
            )
        _refuse_foreign(path, found, vocab_size)


def _refuse_missing(template: Path, rollouts: range) -> None:
    missing = [rollout for rollout in rollouts if not rollout_file(template, rollout).is_file()]
    if missing:
        there = missing[0] - rollouts[0]
        fewer = f"give --num-rollout {missing[0]}, or " if there else ""
        raise DataError(
            f"load_debug_rollout_data: num_rollout = {rollouts[-1] + 1} asks for rollouts {rollouts[0]} to "
            f"{rollouts[-1]}, and {len(missing)} of these {len(rollouts)} have no file, first "
            f"{rollout_file(template, missing[0])}; {fewer}save them with --save-debug-rollout-data"
        )


def _refuse_foreign(path: Path, found: Recorded, vocab_size: int | None) -> None:
    for number, sample in enumerate([*found.trained, *found.lost], start=2):
        largest, smallest = max(sample.tokens, default=0), min(sample.tokens, default=0)
        if smallest < 0 or (vocab_size is not None and largest >= vocab_size):
            raise DataError(
                f"{path}, line {number}: token {largest if smallest >= 0 else smallest}, and the model's vocabulary "
                f"has 0 to {(vocab_size or 0) - 1} (vocab_size = {vocab_size} in config.json); these rollouts are of "
                "another tokenizer, so give --hf-checkpoint the model that they were generated with"
            )
