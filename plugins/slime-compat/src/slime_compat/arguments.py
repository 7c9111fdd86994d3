"""``args``: the one object through which functions written for slime read every setting."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime_compat.flags import slime_flags
from slime_core.config.schema import RunConfig
from slime_core.config.settings import core_settings

__all__ = ["slime_arguments"]


def slime_arguments(config: RunConfig, extra: Mapping[str, Any], **derived: Any) -> SimpleNamespace:
    """Every setting of the core by its own name and by the name that slime has for it; paths as text, tuples as lists.

    Arguments:
        extra: what ``custom_config_path`` adds.
        derived: what only the calling process knows, such as ``sglang_router_port``.
    """
    values = {name: _plain(value) for section in dict(config).values() for name, value in section}
    for flag, name in _slime_names().items():
        values[flag] = values[name]
    values["global_batch_size"] = config.samples_per_step
    values["num_steps_per_rollout"] = config.steps_per_rollout
    return SimpleNamespace(**{**values, **extra, **derived})


def _slime_names() -> dict[str, str]:
    """slime's name of a setting -> ours, for settings that only changed their name."""
    renamed = {
        row.flag: row.text.split()[0].rstrip(",;:") for row in slime_flags().values() if row.verdict == "renamed"
    }
    ours = {setting.flag: setting.name for setting in core_settings().values()}
    return {_attribute(flag): ours[here] for flag, here in renamed.items() if here in ours}


def _attribute(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return [_plain(entry) for entry in value] if isinstance(value, tuple) else value
