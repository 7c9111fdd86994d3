"""``args``: the one object through which functions written for slime read every setting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from slime_compat.flags import slime_flags
from slime_core import RunPlan
from slime_core.types import JsonValue

__all__ = ["slime_arguments"]

OWN = "compat."
"""Prefix of the names of this plugin's options."""

OF_PLUGINS: dict[str, JsonValue] = {
    "offpolicy.tis_clip": 2.0,
    "offpolicy.tis_clip_low": 0.0,
    "offpolicy.opsm_delta": 1e-4,
    "rewards.rm_url": None,
}
"""slime's settings that are options of plugins here, with their values in a run without the plugin."""


def slime_arguments(plan: RunPlan, extra: Mapping[str, Any], **derived: Any) -> SimpleNamespace:
    """Return ``args``: every setting of the core and of this plugin, under its name and under slime's. Paths are
    text; entries of tables of lists, such as evaluation sets, are attributes.

    Arguments:
        extra: entries of ``custom_config_path``.
        derived: values that only the calling process knows, such as ``sglang_router_port``.
    """
    names = {name: name.removeprefix(OWN) for name in plan.settings if "." not in name or name.startswith(OWN)}
    values = {names[name]: _entry(value) for name, value in plan.settings.items() if name in names}
    values |= {name.partition(".")[2]: plan.settings.get(name, default) for name, default in OF_PLUGINS.items()}
    bound = plan.settings.get("offpolicy.tis_threshold")  # another name of tis_clip
    values["tis_clip"] = values["tis_threshold"] = values["tis_clip"] if bound is None else bound
    for flag, name in _slime_names(values).items():
        values[flag] = values[name]
    values["sglang_tp_size"] = values["rollout_num_gpus_per_engine"]  # an engine has no pipeline stages
    values["global_batch_size"] = plan.samples_per_step
    values["num_steps_per_rollout"] = plan.steps_per_rollout
    return SimpleNamespace(**{**values, **extra, **derived})


def _slime_names(settings: Iterable[str]) -> dict[str, str]:
    """Return slime's name -> our name, for settings that only changed their name."""
    renamed = {
        row.flag: row.text.split()[0].rstrip(",;:") for row in slime_flags().values() if row.verdict == "renamed"
    }
    pairs = {_attribute(flag): _attribute(name) for flag, name in renamed.items()}
    names = frozenset(settings)
    return {flag: name for flag, name in pairs.items() if name in names}


def _attribute(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _entry(value: JsonValue) -> Any:
    if isinstance(value, list):
        return [SimpleNamespace(**entry) if isinstance(entry, dict) else _entry(entry) for entry in value]
    return value
