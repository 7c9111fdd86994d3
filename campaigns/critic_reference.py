"""The rollout that ``critic.py`` replays, and what transformers and plain torch make of it.

Nothing of the learner is used here: the backbone is that of Hugging Face, the head linear, the advantages are computed
in a loop, the gradients by torch.autograd.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

import slime_core
from slime_core.rollout.shards import BatchPlan, loss_masks, make_shards
from slime_core.types import Sample, Status, TrainBatch

__all__ = ["GAMMA", "LAMBD", "NUM_STEPS", "Outcome", "head_weights", "in_plain_torch", "make_models", "shards"]

MODEL = Path(slime_core.__file__).parent / "builtin" / "arithmetic" / "model"
NUM_SAMPLES, NUM_STEPS, MAX_TOKENS, SEED = 20, 2, 100, 3
GAMMA, LAMBD = 0.95, 0.9


@dataclass
class Outcome:
    """What the critic of one case did.

    Arguments:
        values, returns: of each sample's response tokens, by the sample's index.
        metrics: an entry an optimizer step.
        gradients: an entry an optimizer step; weights under their Hugging Face names, the head's under their own.
    """

    values: dict[int, torch.Tensor] = field(default_factory=dict)
    returns: dict[int, torch.Tensor] = field(default_factory=dict)
    metrics: list[dict[str, float]] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)


def make_samples() -> tuple[list[Sample], np.ndarray]:
    """Samples of 1 to 6 prompt and 1 to 40 response tokens, a third of them masked; and their rewards."""
    random = np.random.default_rng(SEED)
    samples = []
    for index in range(NUM_SAMPLES):
        prompt, response = int(random.integers(1, 7)), int(random.integers(1, 41))
        mask = (random.random(response) < 2 / 3).astype(int)
        mask[0] = 1
        sample = Sample(
            group_index=index // 4,
            index=index,
            tokens=random.integers(1, 16, prompt + response).tolist(),  # 0 pads, and transformers trains no padding
            response_length=response,
            loss_mask=mask.tolist(),
            status=Status.COMPLETED,
        )
        sample.rollout_log_probs = random.normal(-2, 0.1, response).tolist()
        samples.append(sample)
    samples[3].remove_sample = True
    return samples, random.normal(size=NUM_SAMPLES).astype(np.float32)


def shards(num_ranks: int, divisor: float | None = None) -> list[TrainBatch]:
    """One a data-parallel rank."""
    samples, rewards_B = make_samples()
    return make_shards(
        samples,
        None,
        BatchPlan(num_ranks=num_ranks, num_steps=NUM_STEPS, max_tokens=MAX_TOKENS, token_divisor=divisor),
        rewards_B=rewards_B,
        rollout=0,
        temperature=1.0,
    )


def head_weights(hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight [1, hidden] and bias [1], the same everywhere."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randn(1, hidden, generator=generator) * 0.1, torch.tensor([0.3])


def make_models(folder: Path) -> None:
    """``folder/fresh``, and ``folder/tied``, which differs in its output layer alone."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    shape = {"initializer_range": 0.1, "dtype": torch.float32}
    fresh, tied = (
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL, **shape, tie_word_embeddings=is_tied))
        for is_tied in (False, True)
    )
    tied.model.load_state_dict(fresh.model.state_dict())
    fresh.save_pretrained(folder / "fresh")
    tied.save_pretrained(folder / "tied")


def in_plain_torch(folder: Path, divisor: float | None = None) -> Outcome:
    """Values and returns of all samples, and loss and gradients of the first step."""
    from transformers import AutoModelForCausalLM

    backbone = AutoModelForCausalLM.from_pretrained(folder / "fresh", dtype=torch.float32).model
    head = torch.nn.Linear(backbone.config.hidden_size, 1)
    with torch.no_grad():
        for parameter, weight in zip(head.parameters(), head_weights(head.in_features), strict=True):
            parameter.copy_(weight)
    samples, rewards_B = make_samples()
    found, losses = Outcome(), []
    for place, (sample, mask, reward) in enumerate(zip(samples, loss_masks(samples), rewards_B.tolist(), strict=True)):
        assert sample.index is not None
        hidden_TH = backbone(torch.tensor(list(sample.tokens))[None]).last_hidden_state[0]
        values_U = head(hidden_TH)[sample.prompt_length - 1 : -1, 0]
        returns_U = returns_in_a_loop(values_U.tolist(), mask.tolist(), reward)
        found.values[sample.index], found.returns[sample.index] = values_U.detach(), returns_U
        if place < NUM_SAMPLES // NUM_STEPS and mask.any():
            trained_U = torch.from_numpy(mask) != 0
            squares_U = (values_U - returns_U)[trained_U].square()
            losses.append(squares_U.sum() / (divisor or len(squares_U)))
    loss = torch.stack(losses).mean()
    loss.backward()
    named = [*backbone.named_parameters(prefix="model"), *head.named_parameters(prefix="head")]
    found.gradients = [{name: parameter.grad for name, parameter in named}]
    found.metrics = [{"value_loss": loss.item()}]
    return found


def returns_in_a_loop(values: list[float], mask: list[float], reward: float) -> torch.Tensor:
    """Schulman et al. 2015 (1506.02438), equation 16, over the trained tokens, from the last one backwards."""
    returns, advantage, following = [0.0] * len(values), 0.0, 0.0
    for place in reversed([place for place, trained in enumerate(mask) if trained]):
        advantage = reward + GAMMA * following - values[place] + GAMMA * LAMBD * advantage
        returns[place], following, reward = advantage + values[place], values[place], 0.0
    return torch.tensor(returns)
