"""slime's metrics of turns, reward categories and correct samples, under slime's names: ``--log-multi-turn``,
``--log-reward-category KEY``, ``--log-correct-samples``."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from slime_core.types import JsonValue, Sample, Status

__all__ = ["rollout_metrics"]

PERCENTILES = (25, 50, 75, 100)


def rollout_metrics(samples: Sequence[Sample], settings: Mapping[str, JsonValue]) -> dict[str, float]:
    """Return the metrics that the run's ``settings`` select, over generated samples with a response."""
    answered = [sample for sample in samples if sample.response_length]
    metrics: dict[str, float] = {}
    if settings.get("compat.log_multi_turn"):
        metrics |= dict(_turns(answered))
    if category := settings.get("compat.log_reward_category"):
        metrics |= _categories(answered, str(category))
    if settings.get("compat.log_correct_samples"):
        key = settings.get("reward_key")
        metrics |= dict(_correct(answered, None if key is None else str(key)))
    return metrics


def _turns(samples: Sequence[Sample]) -> Iterator[tuple[str, float]]:
    if not samples:
        return
    truncated = statistics.fmean(float(sample.status is Status.TRUNCATED) for sample in samples)
    lengths = {
        "raw_response_length": [sample.response_length for sample in samples],
        "wo_obs_response_length": [sample.effective_response_length for sample in samples],
    }
    for name, values in lengths.items():
        yield from ((f"multi_turn/{name}/response_length_{each}", number) for each, number in _spread(values))
        yield f"multi_turn/{name}/response_length_clip_ratio", truncated
    rounds = [_rounds(sample) for sample in samples]
    yield from ((f"multi_turn/multi_turn_metric/round_number_{each}", number) for each, number in _spread(rounds))


def _spread(values: Sequence[int]) -> Iterator[tuple[str, float]]:
    yield from (("mean", statistics.fmean(values)), ("max", float(max(values))), ("min", float(min(values))))


def _rounds(sample: Sample) -> int:
    """Return the number of the model's turns: counted by the function, or runs of trained tokens."""
    counted = sample.metadata.get("round_number")
    if isinstance(counted, int):
        return counted
    mask = [1] if sample.loss_mask is None else sample.loss_mask
    return sum(1 for trains, _ in groupby(mask) if trains)


def _categories(samples: Sequence[Sample], key: str) -> dict[str, float]:
    """Return the fraction of each value of the named reward, or of the row's metadata."""
    rewards = [sample.reward if isinstance(sample.reward, dict) else {} for sample in samples]
    values = [reward.get(key, sample.metadata.get(key)) for reward, sample in zip(rewards, samples, strict=True)]
    counts = Counter(str(value) for value in values if value is not None)
    return {f"rollout/error_cat/{value}": count / len(samples) for value, count in counts.items()}


def _correct(samples: Sequence[Sample], key: str | None) -> Iterator[tuple[str, float]]:
    """Yield metrics of samples with reward 1: percentiles of lengths, and mean negative log-probability."""
    scored = [sample for sample in samples if sample.reward is not None]
    correct = [sample for sample in scored if sample.reward_value(key) == 1]
    if not correct:
        return
    lengths = sorted(sample.response_length for sample in correct)
    for percent in PERCENTILES:
        yield f"rollout/correct_length/p{percent}", float(lengths[-(-len(lengths) * percent // 100) - 1])
    surprises = [-statistics.fmean(log_probs) for sample in correct if (log_probs := _trained_log_probs(sample))]
    if surprises:
        yield "rollout/correct_entropy", statistics.fmean(surprises)


def _trained_log_probs(sample: Sample) -> list[float]:
    log_probs = list(sample.rollout_log_probs or ())
    mask = [1] * len(log_probs) if sample.loss_mask is None else sample.loss_mask
    return [log_prob for log_prob, trains in zip(log_probs, mask, strict=True) if trains]
