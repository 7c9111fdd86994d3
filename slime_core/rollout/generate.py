"""The default generate function, and what every generate function is handed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slime_core.data.chat import PromptEncoder
from slime_core.errors import RunError
from slime_core.rollout.client import GenerateClient, Generation, SamplingParams
from slime_core.rollout.models import model_url
from slime_core.types import LogProbs, PromptGroup, Sample, SpecInfo, Status, TokenIds

__all__ = ["GenerateContext", "SingleTurn", "renew"]

FINISHED = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


@dataclass(frozen=True, slots=True)
class GenerateContext:
    """What a generate function works with.

    Arguments:
        client: sends token ids to the engines and returns token ids with log-probabilities.
        encoder: prompt to ids, ids to text.
        evaluation: whether the samples are only measured.
        rollout: number of the rollout; of an evaluation, the steps done.
        models: name -> URL of every model beside the policy.
    """

    client: GenerateClient
    encoder: PromptEncoder
    evaluation: bool = False
    rollout: int = 0
    models: Mapping[str, str] = field(default_factory=dict)

    def model_url(self, name: str, endpoint: str = "") -> str:
        """Where model ``name`` answers: a judge, say, that a generate function asks.

        Raises:
            ConfigError: the run serves no such model.
        """
        return model_url(self.models, name, endpoint)


class SingleTurn:
    """One request a prompt group: all its samples continue the same prompt ids, once.

    Token ids and log-probabilities are kept exactly as the engine returned them; the text is decoded from the ids and
    never encoded again.
    """

    def __init__(self, options: object | None = None) -> None:
        del options

    async def __call__(self, context: GenerateContext, samples: PromptGroup, sampling: SamplingParams) -> list[Sample]:
        """The same samples, finished.

        Raises:
            EngineError: no engine answered.
        """
        prompt_ids = context.encoder.encode(samples[0].prompt)
        answers = await context.client.generate(prompt_ids, sampling=sampling, n=len(samples))
        if len(answers) != len(samples):
            raise RunError(f"{len(samples)} responses were asked for, the engine returned {len(answers)}")
        for sample, answer in zip(samples, answers, strict=True):
            fill(sample, prompt_ids, answer, context.encoder)
        return samples


GENERATED = (
    *("tokens", "response", "response_length", "reward", "loss_mask", "status", "weight_versions", "weight_spans"),
    *("rollout_log_probs", "rollout_routed_experts", "multimodal_train_inputs", "remove_sample"),
    *("non_generation_time", "spec_info", "error"),
)
"""Fields of a sample that say what became of it."""


def renew(sample: Sample) -> None:
    """Make ``sample`` ready to be generated: nothing of an earlier answer is left, and no reward.

    A sample that is still pending keeps what its data source gave it; only its reward goes.
    """
    fresh = Sample()
    for name in GENERATED if sample.status is not Status.PENDING else ("reward",):
        setattr(sample, name, getattr(fresh, name))


def fill(sample: Sample, prompt_ids: list[int], answer: Generation, encoder: PromptEncoder) -> None:
    """Record one answer of the engine in ``sample``."""
    ids = list(answer.token_ids)
    sample.tokens = TokenIds([*prompt_ids, *ids])
    sample.response = encoder.decode(ids)
    sample.response_length = len(ids)
    sample.rollout_log_probs = LogProbs(answer.log_probs)
    sample.weight_versions = list(answer.weight_versions)
    sample.weight_spans = list(answer.weight_spans)
    sample.rollout_routed_experts = answer.routed_experts
    sample.spec_info = answer.spec_info or SpecInfo()
    sample.status = FINISHED[answer.finish_reason]
