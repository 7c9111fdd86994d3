"""Ranks of the learner without Ray, for campaigns that train one thing in several layouts and compare.

A campaign imports the engines once (:func:`prepare`) and forks fresh ranks for every layout (:func:`run_ranks`); each
rank builds a learner (:func:`learner_of`) and leaves what it found in a file.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from slime_core.config.schema import RunConfig
from slime_core.modeling.layout import ParallelLayout
from slime_core.weights.engine_control import reserve_port

__all__ = ["distance", "free_address", "learner_of", "prepare", "relative", "run_ranks"]


def prepare() -> None:
    """Import what every rank needs, once, before any of them is forked."""
    from slime_core.modeling import prepare_megatron

    prepare_megatron()
    # Megatron warns about its own calls between its own modules.
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="megatron")
    warnings.filterwarnings("ignore", message="The .grad attribute|When using", module="megatron")
    # torch 2.13 renamed what Megatron calls.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    torch.set_num_threads(1)
    import mbridge  # noqa: F401
    import transformers

    import slime_core.learner.critic
    import slime_core.learner.rank
    import slime_core.learner.trained_model
    import slime_core.modeling.spec  # noqa: F401

    transformers.utils.logging.disable_progress_bar()


def free_address() -> str:
    """Where ranks that are forked from this process can meet."""
    return f"127.0.0.1:{reserve_port('127.0.0.1')}"


def learner_of(
    config: RunConfig,
    folder: Path,
    architecture: str,
    *,
    rank: int,
    ranks: int,
    address: str,
    layout: ParallelLayout,
    plugins: Sequence[str] = (),
    policy_loss: str = "clipped",
    options: Mapping[str, Any] | None = None,
) -> Any:
    """One rank's learner with the weights in ``folder``, and the components of ``plugins``.

    Arguments:
        options: plugin -> its options object; of a plugin that is not there, the defaults.
    """
    from slime_core.learner import LearnerSettings
    from slime_core.learner.rank import LearnerRank
    from slime_core.plugins.activation import activate

    settings = LearnerSettings(
        config,
        folder,
        architecture,
        policy_loss,
        options=options or {},
        num_steps=100,
        rank=rank,
        world_size=ranks,
        address=address,
        num_threads=1,
        layout=layout,
    )
    implementation = {config.model.model_impl} & {"transformers"}  # the plugin has the name of its layers
    active = activate([*plugins, *implementation], architecture=architecture)
    return LearnerRank(settings, active.registry)


def run_ranks(name: str, count: int, run: Callable[[int], None], *, limit_s: float) -> None:
    """Call ``run`` in ``count`` forked processes, each with its rank; returns when all have ended well.

    Raises:
        SystemExit: a rank failed, and its traceback is on standard error, or one was still running after ``limit_s``.
    """
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run, args=(rank,)) for rank in range(count)]
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + limit_s
    while any(rank.is_alive() for rank in ranks) and time.monotonic() < deadline:
        if any(rank.exitcode for rank in ranks):
            break
        time.sleep(0.01)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.join()
    if any(code != 0 for code in codes):
        sys.exit(f"{name}: exit codes {codes}; None: was still running")


def relative(found: float, expected: float) -> float:
    """The difference of two numbers, over the second."""
    return abs(found - expected) / max(abs(expected), 1e-30)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The L2 norm of the difference, over that of ``expected``."""
    if torch.equal(found, expected):  # both zero, where no token takes an expert
        return 0.0
    return float((found - expected).norm() / expected.norm())
