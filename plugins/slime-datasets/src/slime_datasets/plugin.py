"""The hooks of plugin ``datasets``. Every command imports this module, so it imports no pydantic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core import Registration, hookimpl
from slime_core.errors import DataError

if TYPE_CHECKING:
    from slime_core import RunPlan
    from slime_core.provisional import DerivedSetting
    from slime_core.types import JsonValue
    from slime_datasets.options import DatasetsOptions

__all__: list[str] = []

DEFAULT_PROMPTS = 32
"""Prompts of a rollout if no setting says otherwise, as in the core."""


@hookimpl
def slime_register(add: Registration) -> None:
    add.options("slime_datasets.options:DatasetsOptions")
    add.data_source("prompts", "slime_datasets.prompt_files:PromptFiles")
    add.data_source("buffered", "slime_datasets.buffer:BufferedPrompts")
    add.generate_function(
        "from_messages", "slime_datasets.conversations:FromMessages", scope="group", samples_from_engine=False
    )
    add.generate_function(
        "from_buffer", "slime_datasets.recorded:from_buffer", scope="group", sends_prompts_whole=True, rewards=True
    )


@hookimpl
def slime_settings(options: DatasetsOptions, settings: Mapping[str, JsonValue]) -> Iterator[DerivedSetting]:
    path, prompts = settings.get("prompt_data"), settings.get("rollout_batch_size", DEFAULT_PROMPTS)
    if options.num_epoch is None or not isinstance(path, str) or not isinstance(prompts, int):
        return
    from slime_core.provisional import DerivedSetting
    from slime_datasets.formats import open_rows

    try:
        rows = open_rows(Path(path)).total()
    except DataError:  # reported with the prompts
        return
    rollouts = max(1, options.num_epoch * rows // prompts)
    yield DerivedSetting("num_rollout", rollouts, option="num_epoch", given="keep")


@hookimpl
def slime_check(plan: RunPlan, options: DatasetsOptions, trains: bool) -> Iterator[str]:
    if trains:  # an evaluation has other prompts and no buffer
        yield from _mix(options)
        yield from _buffer(plan, options)


def _mix(options: DatasetsOptions) -> Iterator[str]:
    from slime_datasets.mixed import shares

    for path, times in Counter(path for path, _ in options.prompt_mix).items():
        if times > 1:
            yield f"prompt_mix names {path} {times} times; name it once, with the sum of its weights"
    if options.prompt_mix:
        try:
            shares([weight for _, weight in options.prompt_mix])
        except DataError as problem:
            yield str(problem)


def _buffer(plan: RunPlan, options: DatasetsOptions) -> Iterator[str]:
    if (options.buffer_key is None) is (options.buffer_filter == "stratified"):
        yield (
            f"buffer_filter = {options.buffer_filter} and buffer_key = {options.buffer_key or 'none'}; accepted: both "
            "--buffer-filter stratified and --buffer-key FIELD, or neither"
        )
    if options.buffer_data is None:
        return
    if not options.buffer_data.exists():
        yield (
            f"buffer_data: {options.buffer_data} does not exist; accepted: a JSON Lines file of samples, or a folder "
            "for such files"
        )
    generate = str(plan.settings.get("generate_function"))
    if generate.rpartition(":")[2] != "from_buffer":
        yield (
            f"buffer_data = {options.buffer_data}: generate function {generate} does not train recorded responses. "
            "Choose --generate-function from_buffer, or leave it out"
        )
