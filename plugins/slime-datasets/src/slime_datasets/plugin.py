"""The hooks of plugin ``datasets``; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator

from slime_core import Component, GenerateTraits, hookimpl

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
def slime_register_generate_functions() -> Iterator[Component]:
    yield Component(
        "from_messages",
        target="slime_datasets.conversations:FromMessages",
        traits=GenerateTraits(scope="group", draws=False, masks_turns=True),
        summary="The assistant's turns of each conversation, for supervised fine-tuning (--loss-mask-type)",
    )
