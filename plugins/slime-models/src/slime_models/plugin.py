"""Plugin ``models``: one model spec for each architecture, the setting ``--model`` and the command ``slime models``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core import Registration, hookimpl
from slime_core.errors import ConfigError
from slime_models.families import ALL

if TYPE_CHECKING:
    from slime_core import RunPlan
    from slime_models.options import ModelOptions


@hookimpl
def slime_register(add: Registration) -> None:
    for architecture, family in {family.architecture: family for family in reversed(ALL)}.items():
        add.model_spec(
            family.name,
            family.target,
            architectures={architecture},
            unsupported=family.unsupported,
            summary=f"{family.title} ({family.source})",
        )
    add.options("slime_models.options:ModelOptions")
    add.command("models", "slime_models.command:main")


@hookimpl
def slime_check(plan: RunPlan, options: ModelOptions) -> Iterator[str]:
    """Compare ``config.json`` with ``--model``; the core compares it with the flags."""
    if options.model is None:
        return
    from slime_models.checkpoint import config_of_folder
    from slime_models.recognise import disagreements, find
    from slime_models.shape import ShapeError

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
        mistakes = list(disagreements(preset, config_of_folder(Path(folder))))
    except (ShapeError, ConfigError) as mistake:
        mistakes = [str(mistake)]
    yield from (f"--model {preset.name}: {mistake}" for mistake in mistakes)
