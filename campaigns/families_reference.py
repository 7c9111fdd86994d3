"""Random samples, and what transformers makes of them: what ``families.py`` holds the learner to.

Where routes are replayed, the routers of transformers are made to take them by hooks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime_core.types import Sample, Status
from tests.engines.families import GAP, by_expert, of_hugging_face, smallest_gap

__all__ = ["Expected", "advantage", "expect"]

NUM_SAMPLES = 12
SEEDS = {"qwen3_moe, not normed, tied": 4, "glm4_moe": 1, "moonlight": 1}
"""Where those of seed 0 hold a token whose experts nearly tie."""


@dataclass(frozen=True)
class Expected:
    """The rollout, with the log-probabilities of transformers, and its gradients by checkpoint name."""

    samples: list[Sample]
    gradients: dict[str, torch.Tensor]


def expect(folder: Path, *, replays: bool) -> Expected:
    """What transformers makes of some random samples."""
    model, random = of_hugging_face(folder), np.random.default_rng(SEEDS.get(folder.name, 0))
    samples = [make_sample(index, random) for index in range(NUM_SAMPLES)]
    losses = []
    for sample in samples:
        routes = make_routes(model, len(sample.tokens), random) if replays else None
        sample.rollout_routed_experts = None if routes is None else routes[:-1]
        log_probs_U = of_sample(model, sample, routes)
        sample.rollout_log_probs = log_probs_U.tolist()
        losses.append(-advantage(sample) * log_probs_U.mean())
    torch.stack(losses).mean().backward()
    return Expected(samples, by_expert({name: weight.grad for name, weight in model.named_parameters()}))


def make_sample(index: int, random: np.random.Generator) -> Sample:
    length = int(random.integers(4, 24))
    tokens = random.integers(0, 16, length).tolist()
    return Sample(
        group_index=0, index=index, tokens=tokens, response_length=int(random.integers(1, length)),
        status=Status.COMPLETED,
    )  # fmt: skip


def advantage(sample: Sample) -> float:
    return 1.0 if (sample.index or 0) % 3 else -0.5


def make_routes(model: Any, length: int, random: np.random.Generator) -> np.ndarray:
    """Random different experts; for the last token, which no engine reads, as well."""
    config = model.config
    shape = (length, config.num_hidden_layers)
    chosen = [random.permutation(config.num_experts)[: config.num_experts_per_tok] for _ in np.ndindex(*shape)]
    return np.asarray(chosen, np.int16).reshape(*shape, -1)


def of_sample(model: Any, sample: Sample, routes: np.ndarray | None) -> torch.Tensor:
    ids_T = torch.tensor(list(sample.tokens))
    with routed(model, routes), no_ties(model, checked=routes is None):
        logits_UV = model(ids_T[None]).logits[0, sample.prompt_length - 1 : -1]
    chosen_U: torch.Tensor = logits_UV.log_softmax(-1).gather(1, ids_T[sample.prompt_length :, None])[:, 0]
    return chosen_U


def routers(model: Any) -> list[Any]:
    """In the order of their layers; none in a dense model."""
    return [module for name, module in model.named_modules() if name.endswith("mlp.gate")]


@contextmanager
def routed(model: Any, routes_TLK: np.ndarray | None) -> Iterator[None]:
    """Inside, the routers of ``model`` take these experts, weighed by their own probabilities."""

    def forced(layer: int, router: Any, _: Any, output: Any) -> Any:
        chosen = torch.from_numpy(routes_TLK[:, layer].astype(np.int64))  # type: ignore[index]
        scores = output[0].softmax(-1).gather(1, chosen)
        if router.norm_topk_prob:
            scores = scores / scores.sum(-1, keepdim=True)
        return output[0], scores, chosen

    places = enumerate(routers(model)) if routes_TLK is not None else ()
    hooks = [router.register_forward_hook(partial(forced, layer)) for layer, router in places]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def no_ties(model: Any, *, checked: bool) -> Iterator[None]:
    """Inside, the last expert that a token takes is clearly ahead of the first that it does not."""

    def watch(router: Any, _: Any, output: Any) -> None:
        if (gap := smallest_gap(router, output[0])) < GAP:
            sys.exit(f"two experts are only {gap:.1e} apart; choose another seed")

    hooks = [router.register_forward_hook(watch) for router in (routers(model) if checked else ())]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
