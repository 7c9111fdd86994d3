"""From the settings of a run to what is asked of prompt files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from slime_core.config.sampling import DataConfig
from slime_core.config.schema import RunConfig
from slime_core.plugins.contracts import PromptFormat, PromptRequest
from slime_core.prompts.bad_rows import BadRows
from slime_core.prompts.chat import PromptEncoder
from slime_core.prompts.left_out import BAD, TOO_LONG
from slime_core.prompts.lengths import Counting, PromptLengths, ShortEnough
from slime_core.prompts.row_checks import RowCheck
from slime_core.prompts.rows import Prompt, Reading
from slime_core.types import JsonValue

__all__ = ["LeftOut", "reading_of", "short_enough", "template_arguments", "training_request"]

SAID = {
    TOO_LONG: "prompts are longer than --rollout-max-prompt-len and are left out",
    BAD: "rows of the prompt files, or groups of --buffer-data, cannot be read and are left out (--on-bad-data skip)",
}


class LeftOut:
    """Counts what is left out of the prompts of a run, for metrics and people.

    Arguments:
        bad_rows: receives what is wrong with rows that cannot be read; None: nothing does.
    """

    def __init__(self, bad_rows: Path | None = None) -> None:
        self._bad_rows = BadRows(bad_rows)
        self._counts: Counter[str] = Counter()
        self._told: dict[str, int] = {}

    def tell(self, reason: str, count: int) -> None:
        """So many rows more were left out."""
        self._counts[reason] += count

    def explain(self, mistake: str) -> None:
        """What is wrong with a row that cannot be read, file and line first."""
        self._bad_rows.add(mistake)

    def metrics(self) -> dict[str, float]:
        """``data/left_out/REASON`` -> rows so far, each once however often its epoch comes round."""
        return {f"data/left_out/{reason}": float(count) for reason, count in sorted(self._counts.items())}

    def news(self) -> list[str]:
        """What a person should read, of reasons that have more than twice the rows that were said last."""
        new = [reason for reason, count in sorted(self._counts.items()) if count > 2 * self._told.get(reason, 0)]
        self._told |= {reason: self._counts[reason] for reason in new}
        return ["\n  ".join([self._said(reason), *(self._bad_rows.news() if reason == BAD else [])]) for reason in new]

    def _said(self, reason: str) -> str:
        return f"{self._counts[reason]} {SAID.get(reason, f'rows are left out: {reason}')}"


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
    """What the chat template is given besides the messages."""
    return dict(json.loads(data.apply_chat_template_kwargs))


def training_request(
    config: RunConfig,
    path: Path,
    checks: RowCheck,
    formats: Mapping[str, PromptFormat],
    *,
    vocab_size: int | None = None,
) -> PromptRequest:
    """What the run's data source is asked for, before anything can count tokens.

    Arguments:
        path: of the prompts.
        checks: refuses rows that ask for what the run cannot do.
        formats: name -> how prompt files are read, besides JSON Lines.
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
        checks=checks,
    )


def short_enough(config: RunConfig, encoder: PromptEncoder) -> ShortEnough | None:
    """Which prompts have at most ``rollout_max_prompt_len`` tokens; None: all are kept."""
    longest = config.data.rollout_max_prompt_len
    if longest is None:
        return None

    def count(prompt: Prompt, tools: list[JsonValue] | None) -> int:
        return len(encoder.encode(prompt, tools=tools))

    workers = config.data.num_data_workers
    lengths = PromptLengths(_counting(config, encoder.folder), num_workers=workers) if workers else None
    return ShortEnough(longest, count=count, lengths=lengths)


def _counting(config: RunConfig, folder: Path) -> Counting:
    return Counting(
        folder=str(folder),
        apply_chat_template=config.data.apply_chat_template,
        template_arguments=config.data.apply_chat_template_kwargs,
        trust_remote_code=config.model.trust_remote_code,
    )


def _multimodal_keys(data: DataConfig) -> tuple[tuple[str, str], ...]:
    return () if data.multimodal_keys is None else tuple(json.loads(data.multimodal_keys).items())
