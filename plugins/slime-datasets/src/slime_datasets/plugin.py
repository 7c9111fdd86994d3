"""The hooks of plugin ``datasets``; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator

from slime_core import Component, GenerateTraits, RunPlan, hookimpl
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
        "buffered",
        target="slime_datasets.buffer:BufferedPrompts",
        summary="Groups that came back or were written elsewhere (--buffer-data), by --buffer-filter, then prompts",
    )


@hookimpl
def slime_register_generate_functions() -> Iterator[Component]:
    yield Component(
        "from_messages",
        target="slime_datasets.conversations:FromMessages",
        traits=GenerateTraits(scope="group", draws=False),
        summary="The assistant's turns of each conversation, for supervised fine-tuning (--loss-mask-type)",
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
def slime_check(plan: RunPlan, options: DatasetsOptions, trains: bool) -> Iterator[str]:
    if trains:  # an evaluation has no buffer
        yield from _buffer(plan, options)


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
