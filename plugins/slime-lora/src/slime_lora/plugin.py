"""Plugin ``lora``: trains adapters of low rank in a frozen model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core import Registration, hookimpl
from slime_core.provisional import DerivedSetting, LearnerInfo, NamedTensors, WrappedModel

if TYPE_CHECKING:
    import torch

    from slime_lora.options import LoraOptions


@hookimpl
def slime_register(add: Registration) -> None:
    add.options("slime_lora.options:LoraOptions")
    add.command("convert lora-merge", "slime_lora.merge:main")


@hookimpl
def slime_settings(options: LoraOptions) -> Iterator[DerivedSetting]:
    # TransformerEngine's layers multiply a norm and the matrix after it in one module, so its input is not there.
    yield DerivedSetting("transformer_impl", "local", option="rank")


@hookimpl
def slime_wrap_model(
    spec: object,
    chunks: Sequence[torch.nn.Module],
    learner: LearnerInfo,
    folder: Path,
    export_weights: Callable[[], NamedTensors],
    options: LoraOptions,
) -> WrappedModel:
    from slime_lora.wrapping import LoraModel

    return LoraModel(spec, chunks, learner.settings, options).wrapped(export_weights, base=folder)
