"""The sampler of the rollout tests."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from slime_core.config.learning import AlgorithmConfig
from slime_core.config.options import PluginSettings
from slime_core.config.sampling import DataConfig, EvalConfig, RolloutConfig
from slime_core.config.schema import RunConfig
from slime_core.plugins.activation import activate
from slime_core.rollout import components
from slime_core.rollout.components import SamplerSettings
from slime_core.rollout.sampler import TrainSampler
from tests.unit.rollout.samplers import FOLDER, encoder


@pytest.fixture
def make_sampler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes a sampler over rows of prompts; two groups of two a rollout unless ``rollout`` has other settings."""

    def make(
        client: Any,
        rows: Sequence[dict[str, Any]],
        *,
        rollout: dict[str, Any],
        plugins: Sequence[Path] = (),
        kind: Any = TrainSampler,
        estimator: str = "grpo",
        url: str = "http://unused",
        num_ranks: int = 1,
        in_processes: bool = False,
        provided: PluginSettings | None = None,
        **sections: Any,
    ) -> Any:
        if client is not None:
            monkeypatch.setattr(
                components, "GenerateClient", lambda url, **options: client.made_with.update(options) or client
            )
        monkeypatch.setattr(components, "PromptEncoder", lambda folder, **_: encoder())
        data = tmp_path / "train.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = RunConfig(
            data=DataConfig(rollout_shuffle=False),
            rollout=RolloutConfig(**{"rollout_batch_size": 2, "n_samples_per_prompt": 2, **rollout}),
            algorithm=AlgorithmConfig(advantage_estimator=estimator),
            **{"eval": EvalConfig(eval_prompt_data=(("sums", data),), eval_max_response_len=5), **sections},
        ).with_plugins(provided or PluginSettings())
        active = activate(["datasets", "grpo", "ppo", *map(str, plugins)])
        settings = SamplerSettings(
            config,
            FOLDER,
            data,
            url,
            num_ranks=num_ranks,
            samples_folder=tmp_path / "samples",
            num_engines=3,
            trains=kind is TrainSampler,
        )
        return kind(settings, active.registry, manifest=active.manifest if in_processes else None)

    yield make
    for name in [name for name in sys.modules if name.startswith("slime_local_")]:
        del sys.modules[name]
