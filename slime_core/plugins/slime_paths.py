"""What to write in place of the paths of functions that slime itself ships."""

from __future__ import annotations

__all__ = ["instead_of"]

_OWN = "Leave the flag out: this is what the core does."

_INSTEAD = {
    "slime.rollout.sglang_rollout.generate_rollout": _OWN,
    "slime.rollout.sglang_rollout.generate": _OWN,
    "slime.rollout.sglang_rollout.eval_rollout": _OWN,
    "slime.rollout.data_source.RolloutDataSource": _OWN,
    "slime.rollout.data_source.RolloutDataSourceWithBuffer": (
        "Leave the flag out, or derive from slime_compat.data.BufferedDataSource."
    ),
    "slime.rollout.data_source.pop_first": _OWN,
    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std": (
        "Write it in a file: def keep(args, samples): return len({s.get_reward_value(args) for s in samples}) > 1"
    ),
}


def instead_of(path: str, *, is_installed: bool) -> str | None:
    """The next step for someone who names ``path``; None: it may be a function of the user's.

    Arguments:
        is_installed: whether the package that ``path`` begins with is here.
    """
    if path in _INSTEAD or is_installed or path.partition(".")[0] not in ("slime", "slime_plugins"):
        return _INSTEAD.get(path)
    return "Write a function of your own with the same signature, in a file or an installed package."
