"""The rules of off-policy corrections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from slime_core.config.layout_rules import Rule
from slime_core.config.schema import RunConfig

__all__ = ["CORRECTIONS"]


def _corrections_are_named_once(config: RunConfig) -> Iterator[str]:
    for name, count in Counter(config.algorithm.corrections).items():
        if count > 1:
            yield f"corrections: {name} is named {count} times, and its weights would be multiplied; name it once"


def _correction_bounds_are_used(config: RunConfig) -> Iterator[str]:
    settings = config.algorithm
    low, high = settings.tis_clip_low, settings.tis_clip
    if low > high:
        yield f"tis_clip_low = {low:g} is above tis_clip = {high:g}; the ratio is held between the two"
    if not settings.corrections and config.custom.custom_tis_function_path is None:
        for name, value in {"tis_clip": high, "tis_clip_low": low}.items():
            if value != type(settings).model_fields[name].default:
                yield f"{name} = {value:g} has no effect without corrections; add --corrections tis, or leave it out"


CORRECTIONS: dict[Rule, str] = {
    _corrections_are_named_once: "corrections",
    _correction_bounds_are_used: "corrections tis_clip tis_clip_low custom_tis_function_path",
}
"""Rule -> the settings it reads."""
