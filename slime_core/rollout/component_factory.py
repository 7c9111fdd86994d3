"""The components of a run that the sampler works with, made by name with the options of their plugins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_core.config.schema import RunConfig
from slime_core.errors import RunError
from slime_core.plugins.boundary import boundary
from slime_core.plugins.component import Kind
from slime_core.plugins.construction import construct
from slime_core.plugins.contracts import GroupedRewards, RunView
from slime_core.plugins.formats import PromptFormats
from slime_core.plugins.registry import Registry
from slime_core.prompts.chat import PromptEncoder
from slime_core.prompts.named import GENERATE_FUNCTION, REWARD_MODEL, offered_to_rows
from slime_core.prompts.requests import LeftOut, short_enough, training_request
from slime_core.prompts.row_checks import RowCheck, check_of
from slime_core.rollout.component_router import ComponentRouter
from slime_core.rollout.group_source import GroupSource, PluginRollouts
from slime_core.rollout.guard import CheckedDataSource

__all__ = ["ComponentFactory", "RewardsAsAdvantages"]


class RewardsAsAdvantages:
    """The advantage estimator of rewards that are advantages; see :class:`~slime_core.TrainSamples`."""

    def estimate(self, batch: GroupedRewards) -> NDArray[np.float32]:
        """The rewards, float32 [B]."""
        return batch.rewards_B


class ComponentFactory:
    """Makes components; what one raises names its plugin.

    Arguments:
        config: the run's settings.
        registry: of the run's plugins.
        options: plugin name -> its options object.
        run: what every component is made with.
        bad_rows: a file for what is wrong with rows that are left out because they cannot be read; None: there is none.

    Attributes:
        left_out: counts rows of the training prompts that are left out.
        formats: of prompt files.
    """

    def __init__(
        self,
        config: RunConfig,
        registry: Registry,
        options: dict[str, Any],
        run: RunView,
        *,
        bad_rows: Path | None = None,
    ) -> None:
        self._config, self._registry, self._options, self._run = config, registry, options, run
        self.left_out = LeftOut(bad_rows)
        self.formats = PromptFormats(registry, options, run)

    def make(self, kind: Kind, name: str) -> Any:
        """One component; raises as :func:`~slime_core.plugins.construction.construct` does."""
        return construct(self._registry, kind, name, self._options, self._run)

    def generators(self, default: str) -> ComponentRouter:
        """Generate functions, of which a row may name its own."""
        make = partial(self.make, Kind.GENERATE_FUNCTION)
        return self._choice(Kind.GENERATE_FUNCTION, GENERATE_FUNCTION, default, make=make)

    def rewards(self, default: str, make: Callable[[str], Any]) -> ComponentRouter:
        """Reward models, of which a row may name its own; ``make`` says where each runs."""
        return self._choice(Kind.REWARD_MODEL, REWARD_MODEL, default, make=make)

    def estimator(self, name: str) -> Any:
        """An advantage estimator; None where its scope is ``token``: the learner's ranks load it."""
        traits: Any = self._registry.find(Kind.ADVANTAGE_ESTIMATOR, name).traits
        return self.make(Kind.ADVANTAGE_ESTIMATOR, name) if traits.scope == "sample" else None

    def advantages(self, estimator: Any, rewards: GroupedRewards) -> NDArray[np.float32] | None:
        """What ``estimator`` says, float32 [B]; None without one: the learner estimates them.

        Raises:
            RunError: it failed, or did not return one finite number a sample.
        """
        if estimator is None:
            return None
        name = str(self._config.algorithm.advantage_estimator)
        who = f"advantage estimator {name!r} of {self._registry.owner(Kind.ADVANTAGE_ESTIMATOR, name)}"
        with boundary(who, "estimating advantages", error=RunError, locate=True):
            found = estimator.estimate(rewards)
        with boundary(who, "reading what it returned as one number a sample", error=RunError):
            advantages_B = np.asarray(found, np.float32)
        if advantages_B.shape != (len(rewards),) or not np.isfinite(advantages_B).all():
            raise RunError(
                f"{who} returned shape {advantages_B.shape} for {len(rewards)} samples, or NaN or infinity; accepted "
                "is one finite number a sample"
            )
        return advantages_B

    def checks(self, *, trains: bool) -> RowCheck:
        """What refuses rows that ask for what the run cannot do."""
        return check_of(self._config, self._registry, trains=trains, options=self._options)

    def prompts(self, path: Path, encoder: PromptEncoder) -> CheckedDataSource:
        """The data source of the training prompts."""
        name = self._config.data.data_source
        checks, short = self.checks(trains=True), short_enough(self._config, encoder)
        request = replace(
            training_request(self._config, path, checks, self.formats, vocab_size=encoder.vocab_size),
            keeps=short,
            keeps_many=None if short is None else short.many,
            tell=self.left_out.tell,
            explain=self.left_out.explain,
        )
        run = replace(self._run, prompts=request)
        source = construct(self._registry, Kind.DATA_SOURCE, name, self._options, run)
        return CheckedDataSource(source, name=name, plugin=self._registry.owner(Kind.DATA_SOURCE, name))

    def rollout_source(self, name: str, live: GroupSource) -> PluginRollouts:
        """The rollouts of a plugin's source.

        Arguments:
            live: of the run, which have its prompts.
        """
        source = self.make(Kind.ROLLOUT_SOURCE, name)
        return PluginRollouts(source, name=name, plugin=self._registry.owner(Kind.ROLLOUT_SOURCE, name), live=live)

    def _choice(self, kind: Kind, key: str, default: str, *, make: Callable[[str], Any]) -> ComponentRouter:
        return ComponentRouter(
            kind,
            key,
            default=default,
            registry=self._registry,
            offered=offered_to_rows(self._config, self._registry, self._options),
            make=make,
        )
