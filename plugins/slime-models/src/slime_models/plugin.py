"""The hooks of plugin ``models``; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slime_core import Component, ModelSpecTraits, RunPlan, hookimpl
from slime_core.errors import ConfigError
from slime_models.checkpoint import config_of_folder
from slime_models.families import ALL
from slime_models.options import ModelOptions
from slime_models.recognise import disagreements, find
from slime_models.shape import ShapeError


@hookimpl
def slime_register_model_specs() -> Iterator[Component]:
    """Yield one component for each architecture."""
    for architecture, family in {family.architecture: family for family in reversed(ALL)}.items():
        yield Component(
            family.name,
            target=family.target,
            traits=ModelSpecTraits(architectures={architecture}, unsupported=family.unsupported),
            summary=f"{family.title} ({family.source})",
        )


@hookimpl
def slime_options() -> type[ModelOptions]:
    return ModelOptions


@hookimpl
def slime_check(plan: RunPlan, options: ModelOptions) -> Iterator[str]:
    """Compare ``config.json`` with ``--model``; the core compares it with the flags."""
    if options.model is None:
        return
    try:
        preset = find(options.model)
    except ConfigError as mistake:
        yield f"--model {options.model}: {mistake}"
        return
    folder = plan.settings.get("hf_checkpoint")
    if not isinstance(folder, str):
        yield f"--model {preset.name}: the run has the built-in model; name the checkpoint too: --hf-checkpoint DIR"
        return
    try:
        found = list(disagreements(preset, config_of_folder(Path(folder))))
    except (ShapeError, ConfigError) as mistake:
        found = [str(mistake)]
    yield from (f"--model {preset.name}: {one}" for one in found)
