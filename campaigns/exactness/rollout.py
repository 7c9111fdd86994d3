"""The rollout that every case trains: conversations whose answers the built-in model sampled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from campaigns.exactness.models import ARITHMETIC, ROUTER_GAP, router_gap
from examples.arithmetic.task import VOCABULARY
from examples.tiny_model import EOS_ID
from slime_core.types import Sample, Status

__all__ = ["NUM_STEPS", "TEMPERATURE", "Rollout", "log_probs", "make_rollout"]

PROBLEMS = ARITHMETIC / "data" / "train.jsonl"
NUM_SAMPLES, NUM_STEPS = 24, 2
TEMPERATURE = 0.8
REMOVED = 7
SIBLINGS = {2: 1, 3: 1, 9: 8, 17: 16}
"""Samples that share the rollout of another one, which is in the same optimizer step."""
ENGINE_NOISE = 0.3
"""Nats, as if the engine were far less exact: small differences would drown in what float32 rounds."""
MEAN_ADVANTAGE = 1.5
"""Not 0: the loss would be a difference of nearly equal sums, of which rounding takes a large share."""


@dataclass(frozen=True)
class Rollout:
    """Samples, and a number for each of them that serves as advantage or as reward."""

    samples: list[Sample]
    advantages_B: np.ndarray


def make_rollout(model: Any, mixtures: Sequence[Any]) -> Rollout:
    """Conversations of 1 to 7 sums that ``model`` answered, of 10 to 62 tokens; one removed, some siblings.

    The first sum is the prompt, and what the user says later is masked. Conversations with a token whose experts are
    so close in one of ``mixtures`` that rounding could choose between them are sampled again.
    """
    random = np.random.default_rng(0)
    torch.manual_seed(0)
    problems = [json.loads(line)["prompt"] for line in PROBLEMS.read_text().splitlines()]
    samples: list[Sample] = []
    while len(samples) < NUM_SAMPLES:
        sample = _converse(model, len(samples), random.choice(problems, random.integers(1, 8)).tolist())
        if min(router_gap(mixture, [sample]) for mixture in mixtures) > 2 * ROUTER_GAP:
            samples.append(sample)
    samples[REMOVED].remove_sample = True
    return Rollout(samples, random.normal(MEAN_ADVANTAGE, size=NUM_SAMPLES).astype(np.float32))


def _converse(model: Any, index: int, problems: list[str]) -> Sample:
    tokens: list[int] = []
    mask: list[int] = []
    for problem in problems:
        question = [VOCABULARY.index(token) for token in ("<|user|>", *problem, "<|assistant|>")]
        answer = _answer(model, tokens + question)
        tokens += question + answer
        mask += [0] * len(question) + [1] * len(answer)
    prompt_length = mask.index(1)
    sample = Sample(
        group_index=index // 4,
        index=index,
        rollout_id=SIBLINGS.get(index, index),
        tokens=tokens,
        response_length=len(tokens) - prompt_length,
        loss_mask=mask[prompt_length:],
        status=Status.COMPLETED,
    )
    with torch.no_grad():
        log_probs_U = log_probs(model, sample)[0]
    sample.rollout_log_probs = (log_probs_U + ENGINE_NOISE * torch.randn_like(log_probs_U)).tolist()
    return sample


def _answer(model: Any, tokens: list[int]) -> list[int]:
    """Up to the end of the answer, or four tokens."""
    answer: list[int] = []
    while len(answer) < 4 and EOS_ID not in answer:
        with torch.no_grad():
            logits_V = model(torch.tensor([tokens + answer])).logits[0, -1]
        answer.append(int(torch.multinomial((logits_V / TEMPERATURE).softmax(-1), 1)))
    return answer


def log_probs(model: Any, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the response tokens of ``sample`` under a model of transformers: log-probabilities and entropies, [u] each."""
    ids_T = torch.tensor(list(sample.tokens))
    logits_UV = model(ids_T[None]).logits[0, sample.prompt_length - 1 : -1] / TEMPERATURE
    log_p_UV = logits_UV.log_softmax(-1)
    return log_p_UV.gather(1, ids_T[sample.prompt_length :, None])[:, 0], -(log_p_UV.exp() * log_p_UV).sum(-1)
