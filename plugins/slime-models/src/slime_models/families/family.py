"""Records for the declaration of a model family."""

from __future__ import annotations

from dataclasses import dataclass

from slime_models.count import Counts
from slime_models.shape import Shape

__all__ = ["Family", "Preset", "Published"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The published size of a model, which tests compare with the size computed from the shape.

    Arguments:
        total, active: parameters in billions, as printed on the model card; None if not printed.
        digits: number of printed decimals.
        counts: the parts that the publisher counts (:meth:`slime_models.count.Parameters.published`).
        stored: numbers in the checkpoint's safetensors as Hugging Face counts them, or ``metadata.total_size`` of the
            index divided by the bytes of a number; includes multi-token prediction layers. None: unknown.
        other: numbers in ``stored`` that are no weights, such as the scales of FP8 matrices.
        source: source of ``total``, if it is not the model card.
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
        name: name of its component; families with one architecture share the component of the first.
        architecture, model_type: the names in ``config.json``.
        target: ``package.module:Class`` of its model spec.
        unsupported: ``package.module:function`` that lists the unsupported parts of a ``config.json``.
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
