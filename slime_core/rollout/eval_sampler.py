"""The sampler of a run, or of a part of one, that only measures: no prompts are taken, and nothing is trained on."""

from __future__ import annotations

from slime_core.plugins.manifest import Manifest
from slime_core.plugins.registry import Registry
from slime_core.rollout.sampler import sampler_hooks
from slime_core.rollout.sampler_components import SamplerComponents
from slime_core.rollout.sampler_records import SamplerSettings

__all__ = ["EvalSampler"]


class EvalSampler:
    """See the module; it has the evaluations of a :class:`~slime_core.rollout.sampler.Sampler`, and nothing else."""

    def __init__(self, settings: SamplerSettings, registry: Registry, *, manifest: Manifest | None = None) -> None:
        """Load the tokenizer, the evaluation prompts and the components that they ask for.

        Arguments:
            manifest: of the plugins in ``registry``, for reward models in processes of their own; None: they run here.

        Raises:
            DataError: evaluation prompts cannot be read.
            PluginError: a component cannot be loaded.
        """
        self.hooks = sampler_hooks(settings, registry)
        self._parts = SamplerComponents(settings, registry, hooks=self.hooks, manifest=manifest)
        self.evaluation = self._parts.evaluation()

    async def evaluate(self, step: int) -> dict[str, float]:
        """Scores of every evaluation set under the weights the engines hold now, as ``eval/...`` metrics."""
        return await self.evaluation.run(self._parts.context(step, evaluation=True), None)

    async def close(self) -> None:
        """Close connections; end processes."""
        await self.evaluation.close()
        await self._parts.close()
