"""The sampler of a run that only trains: rollouts are read where another run saved them, and nothing is generated.

It joins the way of a live rollout where the samples of that one were saved, after rewards and sample transforms. The
rest is the same code: hooks, the run's functions, advantages, balance and packing. The same samples under the same
settings thus become the same shards, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_core.plugins.contracts import DataSource
from slime_core.plugins.manifest import Manifest
from slime_core.plugins.registry import Registry
from slime_core.prompts.recorded import Recorded, RolloutFiles
from slime_core.rollout.harvest import Harvest
from slime_core.rollout.ledger import Present
from slime_core.rollout.sampled import Sampled, SamplerSettings
from slime_core.rollout.sampler import Sampler
from slime_core.rollout.transforms import Transforms
from slime_core.types import PromptGroup

__all__ = ["RecordedSampler"]

OF_GENERATION = "perf/tokens_per_gpu_per_sec"
"""The metric that reading a file has no business to report."""


class RecordedSampler(Sampler):
    """Replays rollouts; see the module. No component that generates or rewards is made."""

    def __init__(
        self, settings: SamplerSettings, registry: Registry, *, recorded: Path, manifest: Manifest | None = None
    ) -> None:
        """Load the tokenizer and the advantage estimator.

        Arguments:
            recorded: the files, with ``{rollout_id}`` for the number.

        Raises:
            PluginError: a component cannot be loaded.
        """
        self._files = RolloutFiles(recorded, "load_debug_rollout_data")
        self._place = _Place()
        super().__init__(settings, registry, manifest=manifest)

    async def sample(self, rollout: int) -> Sampled:
        """Read and pack rollout ``rollout``.

        Raises:
            DataError: its file is missing or malformed.
            RunError: no sample of it can be trained on.
        """
        sampled = await super().sample(rollout)
        sampled.metrics.pop(OF_GENERATION, None)
        return sampled

    async def _harvest(self, rollout: int) -> tuple[Harvest, dict[str, float]]:
        found = self._files.read(rollout).subsampled(self._config.debug.load_debug_rollout_data_subsample)
        self._place.cursor = found.cursor
        return _harvested(found, reward_key=self._config.rollout.reward_key), {}

    def _collects(self) -> Any:
        return _NothingCollected()

    def _produces(self) -> Any:
        return _NothingInFlight(self._place)

    def _data_source(self) -> Any:
        return self._place


def _harvested(found: Recorded, *, reward_key: str | None) -> Harvest:
    """As if these groups had just come, and transforms had kept what is trained."""
    groups = [*found.groups, *found.lost_groups]
    harvest = Harvest(Transforms(), wanted=len(groups), reward_key=reward_key)
    harvest.take(groups)
    return harvest


class _NothingCollected:
    """The collector where nothing is generated."""

    def take_failures(self) -> dict[str, float]:
        return {}

    def take_retries(self) -> dict[str, float]:
        return {}


class _NothingInFlight:
    """The production where nothing is generated; its state is that of the live run."""

    def __init__(self, place: _Place) -> None:
        self._place = place

    def check(self) -> None:
        """Nothing can have failed."""

    def published(self, version: int) -> None:
        """No engine serves anything."""

    def metrics(self) -> dict[str, float]:
        return {}

    def present(self) -> Present:
        return Present()

    def state(self) -> dict[str, Any]:
        return self._place.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._place.restore(state)

    async def close(self) -> None:
        """Nothing was started."""


class _Place(DataSource):
    """Where the data source of the live run stood, so that a live run can continue from what is trained here."""

    def __init__(self) -> None:
        self.cursor: dict[str, Any] = {}

    def next_groups(self, n: int) -> list[PromptGroup]:
        raise AssertionError("rollouts are read; nothing asks for prompts")

    def put_back(self, groups: Sequence[PromptGroup]) -> None:
        """Recorded groups come again by their file only."""

    def state(self) -> dict[str, Any]:
        return self.cursor

    def restore(self, state: Mapping[str, Any]) -> None:
        self.cursor = dict(state)

    def __len__(self) -> int:
        return 0
