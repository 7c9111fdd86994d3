"""The label that a reward compares with."""

from __future__ import annotations

from slime_core.errors import DataError
from slime_core.types import Sample

__all__ = ["label_of"]


def label_of(sample: Sample, reward: str) -> str:
    """The label as text, without surrounding white space.

    Raises:
        DataError: there is none for reward model ``reward`` to compare with.
    """
    if sample.label is None:
        raise DataError(
            f"reward model {reward!r}: sample {sample.index} of group {sample.group_index} has no label to compare "
            "with.\n"
            "Name the label's field with --label-key, or choose another reward model."
        )
    # A data source may give numbers as labels.
    return str(sample.label).strip()
