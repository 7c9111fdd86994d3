"""Identifies the family and the presets of a ``config.json``, and lists the differences from a preset."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from slime_core.errors import ConfigError
from slime_core.types import JsonValue
from slime_models.families import ALL, Family, Preset, presets
from slime_models.shape import Shape, ShapeError, differences, read

__all__ = ["Match", "disagreements", "find", "recognise"]

PLACE_IN_TEXT = ("max_position_embeddings", "num_nextn_predict_layers")
"""Fields that do not change the built weights: the context length and the number of prediction layers."""


def find(name: str) -> Preset:
    """Return the preset of this name, in any case.

    Raises:
        ConfigError: there is none; the message names similar presets.
    """
    by_name = {preset.name.lower(): preset for preset in presets().values()}
    if name.lower() in by_name:
        return by_name[name.lower()]
    near = difflib.get_close_matches(name.lower(), by_name, n=3, cutoff=0.4)
    hint = f" Did you mean {' or '.join(by_name[match].name for match in near)}?" if near else ""
    folder = " Give a folder of weights as --hf-checkpoint." if "/" in name else ""
    raise ConfigError(f"There is no preset {name!r}.{folder or hint} slime models list shows all of them.")


@dataclass(frozen=True, slots=True)
class Match:
    """The family and the presets of a checkpoint.

    Arguments:
        families: families with its architecture and model type, usually one.
        presets: presets with its shape.
        nearest: the preset that differs in the fewest fields; None if ``presets`` is not empty.
    """

    families: tuple[Family, ...]
    shape: Shape
    presets: tuple[Preset, ...]
    nearest: Preset | None


def recognise(config: Mapping[str, JsonValue]) -> Match:
    """Identify the object of a ``config.json``.

    Raises:
        ConfigError: no family has its architecture, or a field has an invalid value.
    """
    families = tuple(_families(config))
    try:
        shape = read(config)
    except ShapeError as mistake:
        raise ConfigError(f"config.json {mistake}.") from mistake
    offered = [preset for family in families for preset in family.presets]
    same = tuple(preset for preset in offered if not list(_real_differences(preset.shape, shape)))
    nearest = min(offered, key=lambda preset: len(list(_real_differences(preset.shape, shape))), default=None)
    return Match(families, shape, same, None if same else nearest)


def _families(config: Mapping[str, JsonValue]) -> Iterator[Family]:
    named, kind = config.get("architectures"), config.get("model_type")
    architecture = named[0] if isinstance(named, list) and named else None
    families = [family for family in ALL if (family.architecture, family.model_type) == (architecture, kind)]
    if families:
        return iter(families)
    architectures = sorted({family.architecture for family in ALL})
    near = difflib.get_close_matches(str(architecture), architectures, n=1, cutoff=0.0)[0]
    closest = next(family for family in ALL if family.architecture == near)
    raise ConfigError(
        f"config.json names architecture {architecture!r} with model_type {kind!r}, which no family of slime-models "
        f"is. The closest is {closest.title} ({closest.architecture}, {closest.model_type}). Write a plugin with a "
        "model spec that builds the model in Megatron and maps its weights (docs/models.md)."
    )


def _real_differences(preset: Shape, given_shape: Shape) -> Iterator[tuple[str, object, object]]:
    return (difference for difference in differences(preset, given_shape) if difference[0] not in PLACE_IN_TEXT)


def disagreements(preset: Preset, config: Mapping[str, JsonValue]) -> Iterator[str]:
    """Yield ``field = PRESET'S VALUE, but config.json says VALUE`` for every field in which they differ.

    Raises:
        ShapeError: a field of ``config`` has an invalid value.
    """
    for field, expected, actual in _real_differences(preset.shape, read(config)):
        yield f"{field} = {_text(expected)}, but config.json says {_text(actual)}"


def _text(value: object) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
