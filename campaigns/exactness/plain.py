"""A case in plain torch and transformers: each sample alone, autograd, formulas written out; nothing of the learner.

Two optimizer steps as the learner takes them: log-probabilities of actor and reference before the first one, then for
each step the loss, its metrics, its gradients and what a step of SGD with clipping changes the weights by.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from campaigns.exactness import models
from campaigns.exactness.cases import CLIP, SMALLEST_WEIGHT, Case
from campaigns.exactness.outcome import Outcome
from campaigns.exactness.rollout import NUM_STEPS, Rollout, log_probs
from slime_core.types import Sample

__all__ = ["train"]

Metrics = dict[str, torch.Tensor]


def train(case: Case, rollout: Rollout, folder: Path, dtype: torch.dtype = torch.float32) -> Outcome:
    """The case with the models of ``folder``, see :mod:`campaigns.exactness.models`.

    Raises:
        ValueError: two experts are so close that rounding could choose between them.
    """
    actor, reference = (models.load(folder / name, dtype) for name in ("actor", "reference"))
    terms = _Terms(case, rollout, actor, reference)
    found = Outcome()
    for number in range(NUM_STEPS):
        if number:
            actor = models.load(folder / "second", dtype)
        _refuse_close_experts(actor, rollout)
        _step(terms, actor, number, found)
    _refuse_close_experts(reference, rollout)
    return found


def _refuse_close_experts(model: Any, rollout: Rollout) -> None:
    gap = models.router_gap(model, rollout.samples)
    if gap <= models.ROUTER_GAP:
        raise ValueError(f"two experts are {gap:.1e} apart, {models.ROUTER_GAP} or less; choose another rollout")


def _step(terms: _Terms, actor: Any, number: int, found: Outcome) -> None:
    metrics: Counter[str] = Counter()
    actor.zero_grad()
    for index in terms.of_step(number):
        if float(terms.masks[index].sum()):
            loss, measured = terms.loss(actor, index)
            loss.backward()
            metrics.update({name: float(value.detach()) for name, value in measured.items()})
    gradients = {
        name: part for whole, weight in actor.named_parameters() for name, part in _split_experts(whole, weight.grad)
    }
    norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
    found.metrics.append({**metrics, "grad_norm": norm})
    found.gradients.append({name: gradient.float() for name, gradient in gradients.items()})
    if terms.case.rate is not None:
        rate = terms.case.rate * min(1.0, CLIP / norm)
        found.changes.append({name: (-rate * gradient).float() for name, gradient in gradients.items()})


def _split_experts(name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The parts that a checkpoint names: transformers holds the experts of a layer in one tensor a matrix."""
    if ".experts." not in name:
        yield name, weight.clone()
        return
    layer, _, matrices = name.rpartition(".")
    names = ("gate_proj", "up_proj") if matrices == "gate_up_proj" else (matrices,)
    for number, of_expert in enumerate(weight):
        for matrix, part in zip(names, of_expert.chunk(len(names)), strict=True):
            yield f"{layer}.{number}.{matrix}.weight", part.clone()


class _Terms:
    """What is known before the first step: masks, weights, old and reference log-probabilities, advantages."""

    def __init__(self, case: Case, rollout: Rollout, actor: Any, reference: Any) -> None:
        self.case, self.samples = case, rollout.samples
        self.masks = [_mask(sample) for sample in self.samples]
        rollouts = list(dict.fromkeys(sample.rollout_id for sample in self.samples))
        self._step_of = [rollouts.index(one.rollout_id) * NUM_STEPS // len(rollouts) for one in self.samples]
        with torch.no_grad():
            self._old = [log_probs(actor, sample)[0] for sample in self.samples]
            self._reference = [log_probs(reference, sample)[0] for sample in self.samples]
        self._advantages, self._extra = self._estimate(rollout)

    def of_step(self, number: int) -> list[int]:
        """The samples of as many rollouts as every other step has."""
        return [index for index, step in enumerate(self._step_of) if step == number]

    def weight(self, index: int) -> float:
        """Of each token of a sample; siblings share the mean of their rollout. By a constant divisor, see factor."""
        step = self.of_step(self._step_of[index])
        tokens = {i: float(self.masks[i].sum()) for i in step}
        if self.case.per_token or "loss_token_divisor" in self.case.algorithm:
            return 1 / sum(tokens.values())
        of_rollout: defaultdict[Any, float] = defaultdict(float)
        for i in step:
            of_rollout[self.samples[i].rollout_id] += tokens[i]
        return 1 / (sum(count > 0 for count in of_rollout.values()) * of_rollout[self.samples[index].rollout_id])

    def factor(self, index: int) -> float:
        """What turns the mean of a sample's step over tokens into one of rollouts with a constant divisor."""
        divisor = self.case.algorithm.get("loss_token_divisor")
        if divisor is None:
            return 1.0
        trained = [i for i in self.of_step(self._step_of[index]) if float(self.masks[i].sum())]
        rollouts = {self.samples[i].rollout_id for i in trained}
        return sum(float(self.masks[i].sum()) for i in trained) / (float(divisor) * len(rollouts))

    def loss(self, actor: Any, index: int) -> tuple[torch.Tensor, Metrics]:
        """The weighted loss of one sample, and its share of each metric."""
        settings: Any = {"kl_loss_coef": 0.0, "entropy_coef": 0.0, **self.case.algorithm}
        now_U, entropy_U = log_probs(actor, self.samples[index])
        engine_U = torch.tensor(self.samples[index].rollout_log_probs).to(now_U.dtype)
        loss_U, metrics = POLICY[self.case.policy_loss](
            now_U, self._old[index], self._advantages[index], self.masks[index], settings
        )
        weights_U, left_U, corrected = self._corrections(index, engine_U)
        metrics |= {"pg_loss": loss_U * weights_U * left_U, "entropy_loss": entropy_U, **corrected}
        loss_U = metrics["pg_loss"] - settings["entropy_coef"] * entropy_U * left_U
        if settings.get("use_kl_loss"):
            metrics["kl_loss"] = DIVERGENCE[settings["kl_loss_type"]](now_U - self._reference[index])
            loss_U = loss_U + settings["kl_loss_coef"] * metrics["kl_loss"] * left_U
        metrics["train_rollout_logprob_abs_diff"] = (now_U - engine_U).abs()
        metrics |= {name: values[index] for name, values in self._extra.items()}
        weighted_U, factor = self.weight(index) * self.masks[index], self.factor(index)
        loss = factor * (weighted_U * loss_U).sum()
        sums = {name: (weighted_U * value).sum() for name, value in metrics.items()}
        return loss, {**sums, "loss": loss, "pg_loss": factor * sums["pg_loss"]}

    def _corrections(self, index: int, engine_U: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
        """``tis``, then the user's correction of whole sequences."""
        one_U = torch.ones_like(engine_U)
        if not self.case.estimated:
            return one_U, one_U, {}
        low, high = self.case.offpolicy["tis_clip_low"], self.case.offpolicy["tis_clip"]
        logs_U, mask_U = self._old[index] - engine_U, self.masks[index]
        ratio_U = logs_U.exp()
        held_U = ratio_U.clamp(low, high)
        whole = ((logs_U * mask_U).sum() / mask_U.sum()).exp()
        left_U = one_U * (whole >= SMALLEST_WEIGHT)
        metrics = {"tis": ratio_U, "tis_abs": (ratio_U - 1).abs(), "tis_clipfrac": (held_U != ratio_U).to(one_U.dtype)}
        return held_U * whole, left_U, {**metrics, "sequence_weight": whole * one_U, "left": left_U}

    def _estimate(self, rollout: Rollout) -> tuple[list[torch.Tensor], dict[str, list[torch.Tensor]]]:
        """One number a sample; or REINFORCE++ with 1 added, by loops over tokens."""
        rewards = rollout.advantages_B.tolist()
        if not self.case.estimated:
            return [reward * torch.ones_like(mask) for reward, mask in zip(rewards, self.masks, strict=True)], {}
        divergences = [old - other for old, other in zip(self._old, self._reference, strict=True)]
        settings = self.case.algorithm
        returns = [
            _returns(reward, divergence, mask, settings["kl_coef"], settings["gamma"])
            for reward, divergence, mask in zip(rewards, divergences, self.masks, strict=True)
        ]
        every = torch.cat([values[mask > 0] for values, mask in zip(returns, self.masks, strict=True)]).double()
        spread = every.var(unbiased=False).sqrt()
        advantages = [((values.double() - every.mean()) / spread + 1).to(values.dtype) for values in returns]
        counts = [torch.full_like(values, len(every)) for values in returns]
        return advantages, {"returns": returns, "kl": divergences, "batch_tokens": counts}


def _mask(sample: Sample) -> torch.Tensor:
    mask_U = torch.tensor(sample.loss_mask, dtype=torch.float32)
    return mask_U * (not sample.remove_sample)


def _returns(reward: float, kl_U: torch.Tensor, mask_U: torch.Tensor, coef: float, gamma: float) -> torch.Tensor:
    trained = mask_U.nonzero()[:, 0].tolist()
    returns_U, after = torch.zeros_like(kl_U), reward
    for place in reversed(trained):
        after = -coef * float(kl_U[place]) + (after if place == trained[-1] else gamma * after)
        returns_U[place] = after
    return returns_U


# --- Formulas ---------------------------------------------------------------------------------------------------------


def _surrogate(logs_U: torch.Tensor, advantages_U: torch.Tensor, settings: Any) -> tuple[torch.Tensor, Metrics]:
    """PPO (1707.06347), equation 7, with two clip ranges, and the dual clip (1912.09729)."""
    low, high = settings["eps_clip"], settings.get("eps_clip_high", settings["eps_clip"])
    ratio_U = logs_U.exp()
    free_U, held_U = -ratio_U * advantages_U, -ratio_U.clamp(1 - low, 1 + high) * advantages_U
    loss_U = torch.maximum(free_U, held_U)
    dual_U = torch.zeros_like(loss_U, dtype=torch.bool)
    if "eps_clip_c" in settings:
        bound_U = -settings["eps_clip_c"] * advantages_U
        dual_U = (advantages_U < 0) & (bound_U < loss_U)
        loss_U = loss_U.where(~dual_U, bound_U)
    clipped_U = (held_U > free_U) & ~dual_U
    fractions = {"clip_fraction": clipped_U.to(ratio_U.dtype), "dual_clip_fraction": dual_U.to(ratio_U.dtype)}
    return loss_U, {"ratio": ratio_U, **fractions, "ppo_kl": -logs_U}


def _clipped(
    now_U: torch.Tensor, old_U: torch.Tensor, advantages_U: torch.Tensor, mask_U: torch.Tensor, settings: Any
) -> tuple[torch.Tensor, Metrics]:
    del mask_U
    return _surrogate(now_U - old_U, advantages_U, {"eps_clip": 0.2, **settings})


def _gspo(
    now_U: torch.Tensor, old_U: torch.Tensor, advantages_U: torch.Tensor, mask_U: torch.Tensor, settings: Any
) -> tuple[torch.Tensor, Metrics]:
    """2507.18071, equation 7."""
    mean = ((now_U - old_U) * mask_U).sum() / mask_U.sum()
    return _surrogate(mean.expand_as(now_U), advantages_U, settings)


def _cispo(
    now_U: torch.Tensor, old_U: torch.Tensor, advantages_U: torch.Tensor, mask_U: torch.Tensor, settings: Any
) -> tuple[torch.Tensor, Metrics]:
    """2506.13585, equation 4."""
    del mask_U
    ratio_U = (now_U - old_U).detach().exp()
    weight_U = ratio_U.clamp(1 - settings["eps_clip"], 1 + settings["eps_clip"])
    clipped_U = (weight_U != ratio_U).to(ratio_U.dtype)
    return -weight_U * advantages_U * now_U, {"ratio": ratio_U, "clip_fraction": clipped_U, "ppo_kl": old_U - now_U}


def _sft(now_U: torch.Tensor, *_: Any) -> tuple[torch.Tensor, Metrics]:
    return -now_U, {}


POLICY: dict[str, Callable[..., tuple[torch.Tensor, Metrics]]] = {
    "clipped": _clipped,
    "gspo": _gspo,
    "cispo": _cispo,
    "sft": _sft,
}
DIVERGENCE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda logs_U: logs_U,
    "k2": lambda logs_U: logs_U.square() / 2,
    "k3": lambda logs_U: (-logs_U).exp() - 1 + logs_U,
    "low_var_kl": lambda logs_U: ((-logs_U).exp() - 1 + logs_U).clamp(-10, 10),
}
"""Of the logarithm of actor over reference: joschu.net/blog/kl-approx.html."""
