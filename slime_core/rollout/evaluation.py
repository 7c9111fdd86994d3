"""Held-out prompts: generated and rewarded as in training, measured and written down, never trained on."""

from __future__ import annotations

import copy
from pathlib import Path

from slime_core.config.schema import RunConfig
from slime_core.data.prompts import PromptFiles
from slime_core.errors import RunError
from slime_core.plugins.contracts import DataSource, PromptRequest
from slime_core.rollout.client import SamplingParams
from slime_core.rollout.collect import Collector
from slime_core.rollout.functions import RolloutFunctions, eval_columns
from slime_core.rollout.generate import GenerateContext
from slime_core.rollout.harvest import causes
from slime_core.rollout.scores import EvalScores, score
from slime_core.track.samples import SampleWriter
from slime_core.types import PromptGroup, Sample

__all__ = ["Evaluation"]


class Evaluation:
    """All evaluation sets of a run.

    Arguments:
        config: the run's settings.
        collector: generates and rewards.
        sampling: how responses are drawn.
        functions: those of the run, which may take its place.
        writer: receives the samples.

    Raises:
        DataError: the prompts of a set cannot be read.
    """

    def __init__(
        self,
        config: RunConfig,
        collector: Collector,
        sampling: SamplingParams,
        *,
        functions: RolloutFunctions,
        writer: SampleWriter,
    ) -> None:
        self._config, self._collector, self._sampling = config, collector, sampling
        self._functions, self._writer = functions, writer
        self.sets = {name: self._groups(path) for name, path in config.eval.eval_prompt_data}

    async def run(self, context: GenerateContext, source: DataSource | None) -> dict[str, float]:
        """Scores of every set under the weights that the engines hold now, as ``eval/...`` metrics.

        Arguments:
            context: of an evaluation; its number is the step's.
            source: of the training prompts, for functions of the run; None: there is none.

        Raises:
            RunError: no sample of a set was answered.
        """
        own = await self._functions.evaluation(context.rollout, source)
        if own is not None:
            return own
        metrics: dict[str, float] = {}
        data = {}
        key = self._config.rollout.reward_key
        for name in self.sets:
            samples = await self._measured(name, context)
            metrics |= score(samples, key=key).metrics(f"eval/{name}")
            metrics |= {f"eval/{name}-failed/{cause}": n for cause, n in self._collector.take_failures().items()}
            data[name] = eval_columns(samples, key=key)
        return {} if self._functions.log_evaluation(context.rollout, data, metrics) else metrics

    async def measure(self, name: str, context: GenerateContext) -> EvalScores:
        """The scores of one set, overall and by the values of its metadata."""
        return score(await self._measured(name, context), key=self._config.rollout.reward_key)

    async def _measured(self, name: str, context: GenerateContext) -> list[Sample]:
        groups = copy.deepcopy(self.sets[name])
        finished = await self._collector.collect(context, groups, self._sampling)
        samples = [sample for group in finished for sample in group]
        failed = [sample for sample in samples if sample.reward is None]
        if len(failed) < len(samples):
            self._collector.unanswered(failed)
        self._writer.write(f"eval-{name}", context.rollout, samples)
        if len(failed) == len(samples):
            raise RunError(f"evaluation {name!r}: none of {len(samples)} samples was answered: {causes(failed)}")
        return samples

    def _groups(self, path: Path) -> list[PromptGroup]:
        data = self._config.data
        request = PromptRequest(
            path=path,
            input_key=data.input_key,
            label_key=data.label_key,
            metadata_key=data.metadata_key,
            n_samples_per_prompt=self._config.eval.n_samples_per_eval_prompt,
            shuffle=False,
        )
        source = PromptFiles(request=request)
        return source.next_groups(len(source))
