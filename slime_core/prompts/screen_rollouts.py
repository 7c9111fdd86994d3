"""What is looked at in recorded rollouts before anything starts: that they are there, whole, and of this model."""

from __future__ import annotations

from pathlib import Path

from slime_core.errors import DataError
from slime_core.prompts.recorded import Recorded, RolloutFiles

__all__ = ["screen_rollouts"]

MOST_BYTES = 256 * 2**20
"""Looked through before anything starts, about three seconds of parsing; what lies behind is read when it is due."""


def screen_rollouts(
    files: RolloutFiles,
    rollouts: range,
    *,
    temperature: float,
    vocab_size: int | None,
    share: float | None = None,
    needed: int = 1,
) -> None:
    """Returns if nothing wrong was found in the files of ``rollouts``.

    Arguments:
        temperature: that the run divides logits by.
        vocab_size: of the model; None: nobody knows.
        share: of the prompt groups that is trained on; None: all.
        needed: samples that a rollout needs, one for each optimizer step and data-parallel rank.

    Raises:
        DataError: files are missing or malformed, were drawn at another temperature, hold tokens that the model does
            not have, or too few samples; names file and line.
    """
    _refuse_missing(files, rollouts)
    left = MOST_BYTES
    for rollout in rollouts:
        path = files.path(rollout)
        left -= path.stat().st_size
        if left < 0 and rollout != rollouts[0]:
            return
        found = files.read(rollout)
        if found.temperature != temperature:
            raise DataError(
                f"{path}, line 1: drawn at temperature {found.temperature:g}, and rollout_temperature = "
                f"{temperature:g} would divide the learner's logits by another number; add --rollout-temperature "
                f"{found.temperature:g}"
            )
        _refuse_foreign(path, found, vocab_size)
        count = len(found.subsampled(share).trained)
        if count < needed:
            part = "" if share is None else f", with load_debug_rollout_data_subsample = {share:g}"
            raise DataError(
                f"{path}: {count} samples can be trained on{part}; {needed} are needed, one for each optimizer step "
                "and data-parallel rank"
            )


def _refuse_missing(files: RolloutFiles, rollouts: range) -> None:
    missing = [rollout for rollout in rollouts if not files.path(rollout).is_file()]
    if missing:
        there = missing[0] - rollouts[0]
        fewer = f"give --num-rollout {missing[0]}, or " if there else ""
        raise DataError(
            f"{files.setting}: num_rollout = {rollouts[-1] + 1} asks for rollouts {rollouts[0]} to {rollouts[-1]}, and "
            f"{len(missing)} of these {len(rollouts)} have no file, first {files.path(missing[0])}; {fewer}save them "
            "with --save-debug-rollout-data"
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
