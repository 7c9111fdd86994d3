"""Rollouts on disk, to train on them again: one JSON Lines file a rollout, replaced atomically.

    {"format": "slime rollout", "version": 1, "rollout": 3, "temperature": 1.0, "trained": 2, "samples": 3, ...}
    {"group_index": 6, "index": 12, "tokens": [5, 14, 5, 7, 1], "rollout_log_probs": [-0.25, -0.5], ...}
    ...

The first line is a header; each other line is :meth:`~slime_core.types.Sample.to_dict` of one sample. The first
``trained`` samples are trained on, in this order, siblings side by side; the others were aborted or failed. Numbers
come back bit for bit, because JSON writes enough digits. Reading a file runs no code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

from slime_core.contracts import RolloutBatch, RunView
from slime_core.errors import DataError, RunError
from slime_core.opaque import as_json, from_json
from slime_core.track.record import write_atomically
from slime_core.types import JsonValue, PromptGroup, Sample
from slime_core.untrusted import open_regular

FORMAT = "slime rollout"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded rollout.

    Arguments:
        rollout: its number.
        temperature: of sampling.
        trained: samples to train on.
        lost: samples that were aborted or failed.
        cursor: the position of the data source after it.
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
        """The lost samples by prompt group."""
        return _runs(self.lost)

    def subsampled(self, share: float | None) -> Recorded:
        """Return the rollout with the first ``share`` of its prompt groups, at least one. None: all groups."""
        if share is None:
            return self
        groups = self.groups[: max(1, round(share * len(self.groups)))]
        samples = [sample for group in groups for sample in group]
        return Recorded(self.rollout, self.temperature, samples, [], self.cursor)


def rollout_file(template: Path, rollout: int) -> Path:
    """Return the file of one rollout: ``debug/{rollout_id}.jsonl`` becomes ``debug/3.jsonl``."""
    return Path(f"{template}".replace("{rollout_id}", f"{rollout}"))


def _runs(samples: Sequence[Sample]) -> list[PromptGroup]:
    return [list(group) for _, group in groupby(samples, key=lambda sample: sample.group_index)]


# --- Writing ----------------------------------------------------------------------------------------------------------


def write_rollout(path: Path, recorded: Recorded) -> Path:
    """Write ``recorded`` to ``path`` atomically.

    Raises:
        RunError: JSON cannot represent a field of a sample; names the sample and the field.
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
    entries = []
    for name, value in sample.to_dict().items():
        try:
            entries.append(f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False, default=_packed)}")
        except (TypeError, ValueError) as problem:
            raise RunError(
                f"sample {sample.index}: its {name} cannot be saved as JSON: {problem}. Keep numbers, text, lists, "
                "tables and NumPy arrays of numbers in samples, or leave --save-debug-rollout-data out."
            ) from None
    return f"{{{', '.join(entries)}}}"


def _packed(value: Any) -> Any:
    import numpy as np

    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return as_json(value)
    raise TypeError(f"a {type(value).__name__}")


class RecordedRollouts:
    """Rollouts from files, for training without engines (``--load-debug-rollout-data``).

    The data source continues from the cursor in the file, so that a live run can resume from this one.
    """

    def __init__(self, run: RunView) -> None:
        self._files = Path(str(run.settings["load_debug_rollout_data"]))
        share = run.settings["load_debug_rollout_data_subsample"]
        self._share = share if isinstance(share, float) else None

    async def fill(self, batch: RolloutBatch) -> Mapping[str, float]:
        """Read rollout ``batch.rollout``.

        Raises:
            DataError: its file is missing or malformed.
        """
        recorded = read_numbered(self._files, batch.rollout).subsampled(self._share)
        batch.prompts.restore(recorded.cursor)
        groups = [*recorded.groups, *recorded.lost_groups]
        batch.wanted = len(groups)
        await batch.add(groups)
        return {}

    def state(self) -> Mapping[str, JsonValue]:
        """Return an empty state: the number of a rollout names its file."""
        return {}

    def restore(self, state: Mapping[str, JsonValue]) -> None:
        """Do nothing."""


# --- Reading ----------------------------------------------------------------------------------------------------------


def read_rollout(path: Path) -> Recorded:
    """Return the rollout in ``path``.

    Raises:
        DataError: the file is missing or malformed; names the line.
    """
    with _opened(path) as file:
        header, *lines = file.read().splitlines() or [b""]
    fields = _header(path, header)
    samples = [_sample(path, number, line) for number, line in enumerate(lines, start=2)]
    trained = fields["trained"]
    if len(samples) != fields["samples"] or not 0 <= trained <= len(samples):
        raise DataError(
            f"{path}, line 1: the header announces {fields['samples']} samples, {trained} of them trained, and "
            f"{len(samples)} follow; save the rollout again"
        )
    return Recorded(fields["rollout"], fields["temperature"], samples[:trained], samples[trained:], fields["cursor"])


def read_numbered(template: Path, rollout: int) -> Recorded:
    """Return the rollout of that number, from its :func:`rollout_file`.

    Raises:
        DataError: its file is missing, malformed, or another rollout's.
    """
    path = rollout_file(template, rollout)
    recorded = read_rollout(path)
    if path != template and recorded.rollout != rollout:
        raise DataError(
            f"{path}, line 1: this is rollout {recorded.rollout}, but its name says {rollout}; rename the files, or "
            "name this file alone with --load-debug-rollout-data"
        )
    return recorded


def _opened(path: Path) -> BinaryIO:
    try:
        return open_regular(path)
    except OSError as problem:
        raise DataError(f"{path} cannot be read: {problem.strerror}; accepted: a saved rollout") from problem


def _header(path: Path, line: bytes) -> dict[str, Any]:
    header = _object(path, 1, line)
    missing = {"rollout", "temperature", "trained", "samples", "cursor"} - header.keys()
    if header.get("format") != FORMAT or header.get("version") != VERSION or missing:
        raise DataError(
            f"{path}, line 1: {line[:80]!r}; accepted: a rollout as --save-debug-rollout-data writes it, format "
            f"{FORMAT!r}, version {VERSION}"
        )
    return header


def _sample(path: Path, number: int, line: bytes) -> Sample:
    values = _object(path, number, line)
    try:
        return Sample.from_dict(values)
    except (TypeError, ValueError, OverflowError) as problem:
        raise DataError(f"{path}, line {number}: no sample: {problem}; save the rollout again") from None


def _object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        values = json.loads(line, object_hook=from_json)
        if isinstance(values, dict):
            return values
    except (ValueError, TypeError, RecursionError) as problem:
        raise DataError(f"{path}, line {number}: no JSON: {problem}; accepted: a saved rollout") from None
    raise DataError(f"{path}, line {number}: a {type(values).__name__}, not an object; accepted: a saved rollout")


def screen_rollouts(template: Path, rollouts: range, *, temperature: float) -> None:
    """Check the headers of the files of ``rollouts`` before a run trains on them.

    Raises:
        DataError: files are missing or malformed, or were sampled at another temperature than the ``temperature`` by
            which the learner divides logits; names file and line.
    """
    paths = [rollout_file(template, rollout) for rollout in rollouts]
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise DataError(
            f"load_debug_rollout_data: num_rollout = {rollouts.stop} needs rollouts {rollouts.start} to "
            f"{rollouts.stop - 1}, but {len(missing)} of these {len(rollouts)} have no file, first {missing[0]}; lower "
            "--num-rollout, or save them with --save-debug-rollout-data"
        )
    for path in paths:
        with _opened(path) as file:
            recorded = _header(path, file.readline())["temperature"]
        if recorded != temperature:
            raise DataError(
                f"{path}, line 1: sampled at temperature {recorded:g}, but rollout_temperature = {temperature:g}; add "
                f"--rollout-temperature {recorded:g}"
            )
