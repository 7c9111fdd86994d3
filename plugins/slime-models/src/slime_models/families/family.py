"""What a family's file declares."""

from __future__ import annotations

from dataclasses import dataclass

from slime_models.count import Counts
from slime_models.shape import Shape

__all__ = ["Family", "Preset", "Published"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What the model's publisher says about its size, to compare with what follows from the shape.

    Arguments:
        total, active: in billions, as printed on the model card; None: not printed.
        digits: how many of their digits are given after the point.
        counts: what of the model they count (:meth:`slime_models.count.Parameters.published`).
        stored: numbers in the checkpoint's safetensors as Hugging Face counts them, or ``metadata.total_size`` of the
            index divided by the bytes of one; multi-token prediction layers included. None: not known.
        other: those of ``stored`` that are no weights, such as the scales of FP8 matrices.
        source: where ``total`` is from, if not from the card.
    """

    total: float
    active: float | None = None
    digits: int = 0
    counts: Counts = "all"
    stored: int | None = None
    other: int = 0
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A named model."""

    name: str
    checkpoint: str
    shape: Shape
    published: Published


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models of one architecture that differ in size only.

    Arguments:
        name: of its component, where it has one of its own.
        architecture, model_type: how ``config.json`` names it.
        target: ``package.module:Class`` of its model spec.
        unsupported: ``package.module:function``; what of a ``config.json`` is not built.
        source: the report that describes it.
    """

    name: str
    title: str
    architecture: str
    model_type: str
    target: str
    unsupported: str
    source: str
    presets: tuple[Preset, ...] = ()
