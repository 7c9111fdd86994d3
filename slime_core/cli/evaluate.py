"""``slime eval``: measures a model, or what a run or a checkpoint holds, on held-out prompts."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core.checkpoint.folder import find
from slime_core.cli.preflight import preflight
from slime_core.cli.run import options_of
from slime_core.config.schema import DebugConfig
from slime_core.errors import ConfigError

if TYPE_CHECKING:
    from slime_core.config.load import Resolved
    from slime_core.plugins.registry import ActivePlugins

__all__ = ["execute", "expand"]


def expand(argv: Sequence[str]) -> list[str]:
    """Flags for what a leading run folder or checkpoint means: that run's own settings, and the checkpoint's weights.

    Raises:
        ConfigError: the folder holds no checkpoint, or one without Hugging Face weights.
    """
    if not argv or argv[0].startswith("-"):
        return list(argv)
    checkpoint = find(Path(argv[0]))
    if not checkpoint.hf.is_dir():
        raise ConfigError(
            f"{checkpoint.path} has no hf folder (it was saved with --save-hf false), so engines cannot load it"
        )
    known = [] if checkpoint.home is None else ["--config", str(checkpoint.home / "config.toml")]
    return [*known, "--hf-checkpoint", str(checkpoint.hf), *argv[1:]]


def execute(resolved: Resolved, active: ActivePlugins, *, architecture: str) -> int:
    """Print the scores; returns the exit code."""
    # A run of one half alone is evaluated as any other.
    resolved = replace(resolved, config=resolved.config.model_copy(update={"debug": DebugConfig()}))
    preflight(resolved.config, active.registry, trains=False)
    from slime_core.launch import Job, evaluate

    with tempfile.TemporaryDirectory(prefix="slime-eval-") as logs:
        job = Job(
            config=resolved.config,
            registry=active.registry,
            manifest=active.manifest,
            architecture=architecture,
            logs=Path(logs),
            options=options_of(resolved, active),
        )
        print(f"model: {job.model}", flush=True)
        scores = evaluate(job, warn=_warn)
    for name, value in scores.items():
        print(f"{name}: {value:.4f}")
    return 0


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)
