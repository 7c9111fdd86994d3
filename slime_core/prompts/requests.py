"""Makes the requests to data sources and evaluation sets from the settings of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from slime_core.config.sampling import DataConfig
from slime_core.config.schema import RunConfig
from slime_core.plugins.contracts import PromptFilter, PromptFormat, PromptRequest
from slime_core.prompts.chat import PromptEncoder
from slime_core.prompts.left_out import LeftOut
from slime_core.prompts.lengths import Counting, PromptLengths, ShortEnough
from slime_core.prompts.rows import Prompt, Reading
from slime_core.types import JsonValue

__all__ = ["RunFilter", "reading_of", "short_enough", "template_arguments", "training_request"]


class RunFilter(PromptFilter):
    """Which prompts a run uses, for training or in an evaluation.

    Arguments:
        left_out: counts the others.
        checks: of what rows ask for.
        short: says which prompts are short enough; None: all are.
    """

    def __init__(self, left_out: LeftOut, checks: PromptFilter | None = None, short: ShortEnough | None = None) -> None:
        self._left_out = left_out
        self._checks = checks or PromptFilter()
        self._short = short

    def check(self, metadata: Mapping[str, JsonValue], where: str) -> None:
        """See :class:`~slime_core.PromptFilter`."""
        self._checks.check(metadata, where)

    def select(self, prompts: Sequence[tuple[Prompt, list[JsonValue] | None]]) -> Sequence[bool]:
        """See :class:`~slime_core.PromptFilter`."""
        return self._checks.select(prompts) if self._short is None else self._short.select(prompts)

    def count_left_out(self, reason: str, count: int) -> None:
        """See :class:`~slime_core.PromptFilter`."""
        self._left_out.count_left_out(reason, count)

    def report_bad_row(self, mistake: str) -> None:
        """See :class:`~slime_core.PromptFilter`."""
        self._left_out.report_bad_row(mistake)


def reading_of(data: DataConfig, formats: Mapping[str, PromptFormat]) -> Reading:
    """How the rows of prompt files are read."""
    return Reading(
        input_key=data.input_key,
        label_key=data.label_key,
        metadata_key=data.metadata_key,
        tool_key=data.tool_key,
        multimodal_keys=_multimodal_keys(data),
        formats=formats,
    )


def template_arguments(data: DataConfig) -> dict[str, JsonValue]:
    """What the chat template is given in addition to the messages."""
    return dict(json.loads(data.apply_chat_template_kwargs))


def training_request(
    config: RunConfig,
    path: Path,
    filter: PromptFilter,
    formats: Mapping[str, PromptFormat],
    *,
    vocab_size: int | None = None,
) -> PromptRequest:
    """The request to the run's data source, for training.

    Arguments:
        path: of the prompts.
        filter: which prompts the run uses.
        formats: name -> how prompt files are read, in addition to JSON Lines.
        vocab_size: ids that the model has; None: not known.
    """
    data, reading = config.data, reading_of(config.data, formats)
    return PromptRequest(
        path=path,
        input_key=reading.input_key,
        label_key=reading.label_key,
        metadata_key=reading.metadata_key,
        tool_key=reading.tool_key,
        multimodal_keys=reading.multimodal_keys,
        n_samples_per_prompt=config.rollout.n_samples_per_prompt,
        shuffle=data.rollout_shuffle,
        seed=config.run.seed,
        skips_bad=data.on_bad_data == "skip",
        formats=formats,
        vocab_size=vocab_size,
        filter=filter,
    )


def short_enough(config: RunConfig, encoder: PromptEncoder) -> ShortEnough | None:
    """Which prompts have at most ``rollout_max_prompt_len`` tokens; None: all are kept."""
    longest = config.data.rollout_max_prompt_len
    if longest is None:
        return None
    workers = config.data.num_data_workers
    lengths = PromptLengths(_counting(config, encoder.folder), num_workers=workers) if workers else None
    return ShortEnough(longest, encoder, lengths=lengths)


def _counting(config: RunConfig, folder: Path) -> Counting:
    return Counting(
        folder=str(folder),
        apply_chat_template=config.data.apply_chat_template,
        template_arguments=config.data.apply_chat_template_kwargs,
        trust_remote_code=config.model.trust_remote_code,
    )


def _multimodal_keys(data: DataConfig) -> tuple[tuple[str, str], ...]:
    return () if data.multimodal_keys is None else tuple(json.loads(data.multimodal_keys).items())
