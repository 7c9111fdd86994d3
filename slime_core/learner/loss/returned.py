"""What a component returned to a learner rank, held to its contract; messages name the component."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from slime_core.errors import RunError

__all__ = ["require_per_token", "require_type"]

REPORT = "Report this to the plugin's author."


def require_type(found: Any, expected: type, who: str) -> None:
    """Returns if ``found`` is an ``expected``.

    Raises:
        RunError: it is something else.
    """
    if not isinstance(found, expected):
        raise RunError(f"{who} returned a {type(found).__name__}; accepted is a {expected.__name__}. {REPORT}")


def require_per_token(values: Mapping[str, Any], metrics: Any, *, metrics_name: str, count: int, who: str) -> None:
    """Returns if every value, and every metric, is a tensor of one number a response token.

    Arguments:
        values: by the name of its field.
        metrics: what stands in the field ``metrics_name``: a tensor by the metric's name.
        count: response tokens.

    Raises:
        RunError: one is not.
    """
    if not isinstance(metrics, Mapping):
        raise RunError(
            f"{who} returned {metrics_name} as a {type(metrics).__name__}; accepted is a dict of one number a token by "
            f"name. {REPORT}"
        )
    named = {f"{metrics_name}[{name!r}]": found for name, found in metrics.items()}
    for name, found in {**values, **named}.items():
        if not (isinstance(found, torch.Tensor) and found.shape == (count,)):
            raise RunError(
                f"{who} returned {name} {_described(found)} for {count} response tokens; accepted is one number a "
                f"token. {REPORT}"
            )


def _described(found: Any) -> str:
    return f"of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else f"as a {type(found).__name__}"
