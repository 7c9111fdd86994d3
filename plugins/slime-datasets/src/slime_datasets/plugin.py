"""The hooks of plugin ``datasets``; imports nothing heavy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from slime_core import Component, DerivedSetting, GenerateTraits, RunPlan, hookimpl
from slime_core.errors import DataError
from slime_core.prompts.rows import unreadable
from slime_datasets.mixed import shares
from slime_datasets.options import DatasetsOptions

__all__: list[str] = []

FORMATS = (
    ("parquet", "Parquet", "Parquet files"),
    ("state.json", "SavedDataset", "Folders that the datasets library saved (save_to_disk), one split each"),
    ("dataset_dict.json", "SavedSplits", "Of a saved data set of several splits, the folder of one is to be named"),
)
"""Name, target and summary of each prompt format."""


@hookimpl
def slime_register_prompt_formats() -> Iterator[Component]:
    for name, target, summary in FORMATS:
        yield Component(name, target=f"slime_datasets.formats:{target}", summary=summary)


@hookimpl
def slime_register_data_sources() -> Iterator[Component]:
    yield Component(
        "streams",
        target="slime_datasets.streams:PromptStreams",
        summary="Prompts read as they are needed (--streaming-data), or of several files in shares (--prompt-mix)",
    )
    yield Component(
        "buffered",
        target="slime_datasets.buffer:BufferedPrompts",
        summary="Groups that came back or were written elsewhere (--buffer-data), by --buffer-filter, then prompts",
    )


@hookimpl
def slime_register_generate_functions() -> Iterator[Component]:
    yield Component(
        "from_messages",
        target="slime_datasets.conversations:FromMessages",
        traits=GenerateTraits(scope="group", samples_from_engine=False),
        summary="The assistant's turns of each conversation, for supervised fine-tuning",
    )
    yield Component(
        "from_buffer",
        target="slime_datasets.given:FromBuffer",
        traits=GenerateTraits(scope="group", sends_prompts_whole=True, rewards=True),
        summary="Trajectories that the data source gives, as they are; one response to each other prompt",
    )


@hookimpl
def slime_options() -> type[DatasetsOptions]:
    return DatasetsOptions


@hookimpl
def slime_settings(options: DatasetsOptions) -> Iterator[DerivedSetting]:
    for option, is_set in (("prompt_mix", options.prompt_mix), ("streaming_data", options.streaming_data)):
        if is_set:  # data_source is kept if the run names one: buffered reads these settings too
            yield DerivedSetting("data_source", "streams", option=option, given="keep")


@hookimpl
def slime_check(plan: RunPlan, options: DatasetsOptions, trains: bool) -> Iterator[str]:
    if trains:  # an evaluation has its own prompts and no buffer
        yield from _prompts(plan, options)
        yield from _buffer(plan, options)


def _prompts(plan: RunPlan, options: DatasetsOptions) -> Iterator[str]:
    for path, times in Counter(path for path, _ in options.prompt_mix).items():
        if times > 1:
            yield (
                f"prompt_mix names {path} {times} times, and its prompts would come as often in one batch; name it "
                "once, with the sum of its weights"
            )
        if _generates(plan):
            yield from (f"prompt_mix: {problem}" for problem in unreadable(path))
    if options.prompt_mix:
        try:
            shares([weight for _, weight in options.prompt_mix])
        except DataError as problem:
            yield str(problem)
    source = str(plan.settings.get("data_source"))
    given = [name for name in ("prompt_mix", "streaming_data") if getattr(options, name)]
    if given and plan.settings.get(source) is not None:  # the setting of a function by path has its source's name
        yield (
            f"{' and '.join(given)}: {source} = {plan.settings[source]} reads --prompt-data, held in memory. Leave one "
            "of the two out"
        )


def _generates(plan: RunPlan) -> bool:
    return not plan.settings.get("debug_train_only") and plan.settings.get("load_debug_rollout_data") is None


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
            f"buffer_data = {options.buffer_data}: generate function {generate} does not train responses that are "
            "given. Choose one that does, --generate-function from_buffer, or leave it out"
        )
