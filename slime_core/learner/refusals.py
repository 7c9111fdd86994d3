"""What ends a run before anything that it spoilt is published."""

from __future__ import annotations

import math

from slime_core.errors import NonFiniteError, RunError

__all__ = ["refuse_no_gradient", "refuse_non_finite", "refuse_wrong_weights"]


def refuse_non_finite(metrics: dict[str, float], rollout: int, *, of: str = "") -> None:
    """Return if every metric is a finite number.

    Arguments:
        of: what stands before the names of the settings that could help, ``"critic_"``.

    Raises:
        NonFiniteError: one is not.
    """
    bad = sorted(name for name, value in metrics.items() if not math.isfinite(value))
    if bad:
        settings = " or ".join(f"--{of}{name}".replace("_", "-") for name in ("lr", "clip_grad"))
        raise NonFiniteError(
            f"rollout {rollout}: not finite (NaN or infinity): {', '.join(bad)}. Nothing of this step was published or "
            f"saved. Look at the samples of this rollout, then lower {settings}, or resume from the last "
            "checkpoint with --load."
        )


def refuse_no_gradient(has_gradient: float) -> None:
    """Return if minimising the loss of a step changes a weight.

    Arguments:
        has_gradient: 1 if the loss of any micro-batch on any rank needs a gradient, else 0.

    Raises:
        RunError: it would change none.
    """
    if not has_gradient:
        raise RunError(
            "the loss of a step needs no gradient: no weight that trains has a part in it, so the step would change "
            "nothing. A loss of --custom-loss-function-path has to be computed from the logits that it is given; else "
            "name other weights in --only-train-params-name-list or --freeze-params-name-list."
        )


def refuse_wrong_weights(weight: float, rollout: int) -> None:
    """Return if the loss weights of a step add up: to 1, or to 0 where every token is masked.

    Raises:
        RunError: they do not.
    """
    if not (math.isclose(weight, 1.0, abs_tol=1e-3) or weight == 0.0):
        raise RunError(
            f"rollout {rollout}: the loss weights of a step add up to {weight:.6f} instead of 1; "
            "a shard is missing or doubled"
        )
