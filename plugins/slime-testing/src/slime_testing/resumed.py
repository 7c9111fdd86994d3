"""Checks of generate functions that resume aborted responses (trait ``resumes``)."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from slime_core.types import LogProbs, Mask, Sample, Status, TokenIds
from slime_testing.suite import require

__all__ = ["ended", "require_left_alone", "require_resumed"]

SampledPairs = Sequence[tuple[list[int], list[int]]]


def ended(sample: Sample, *, text: str) -> Sample:
    """Return ``sample`` as a run has it after an abort half way: with ``text`` and the first half of its tokens."""
    half = sample.response_length // 2
    end = len(sample.tokens) - sample.response_length + half
    aborted = copy.deepcopy(sample)
    aborted.tokens, aborted.response_length, aborted.response = TokenIds(list(sample.tokens)[:end]), half, text
    aborted.rollout_log_probs = LogProbs(list(sample.rollout_log_probs or ())[:half])
    aborted.loss_mask = None if sample.loss_mask is None else Mask(list(sample.loss_mask)[:half])
    aborted.weight_spans = [(version, start, min(end, half)) for version, start, end in sample.weight_spans]
    aborted.status, aborted.reward = Status.ABORTED, None
    return aborted


def require_resumed(
    before: Sample, returned: Sequence[Sample], sampled: SampledPairs, *, versions: Sequence[str], most: int | None
) -> None:
    """Check that ``returned`` contains ``before``, continued with tokens that the engine sampled after the abort.

    Arguments:
        sampled: prompt and response of each generation since the abort.
        versions: versions of the weights that sampled the whole response, oldest first.
        most: limit on its response tokens; None if the function decides.
    """
    who = (
        f"sample {before.index} of group {before.group_index}, which was aborted with {before.response_length} tokens,"
    )
    after = next((candidate for candidate in returned if candidate.index == before.index), None)
    require(after is not None, f"{who} was not returned")
    assert after is not None
    have = list(before.tokens)
    others = [prompt for prompt, _ in sampled if prompt[: len(have)] != have]
    require(
        bool(sampled) and not others,
        f"{who} was {'restarted' if sampled else 'not resumed'}: send the engine all of its tokens, so that it "
        "samples what follows. A function that cannot do so declares resumes=False",
    )
    _require_kept(who, before, after)
    require(after.status in (Status.COMPLETED, Status.TRUNCATED), f"{who} is {after.status} now; finish it")
    require(
        list(after.weight_versions) == list(versions),
        f"{who} was sampled from weights of the versions {list(versions)}, but its weight_versions are "
        f"{list(after.weight_versions)}: append the versions of the new tokens",
    )
    require(
        most is None or after.response_length <= most,
        f"{who} has {after.response_length} tokens now and may have {most}; earlier tokens count",
    )


def _require_kept(who: str, before: Sample, after: Sample) -> None:
    have, log_probs = list(before.tokens), list(before.rollout_log_probs or ())
    require(list(after.tokens)[: len(have)] == have, f"{who} lost tokens or got others in their place; keep them")
    require(
        list(after.rollout_log_probs or ())[: len(log_probs)] == log_probs,
        f"{who} lost the log-probabilities that its tokens had; those of new tokens follow them",
    )
    require(
        len(after.rollout_log_probs or ()) == after.response_length > before.response_length,
        f"{who} has {after.response_length} response tokens and {len(after.rollout_log_probs or ())} log-probabilities "
        "now; both count those that it had and those that were added",
    )


def require_left_alone(before: Sequence[Sample], returned: Sequence[Sample]) -> None:
    """Check that finished siblings of an aborted sample are returned unchanged."""
    for sibling in before:
        same = [list(after.tokens) == list(sibling.tokens) and after.status is sibling.status for after in returned]
        require(
            any(same),
            f"sample {sibling.index} of group {sibling.group_index} was finished, and came back changed or not at all, "
            "with an aborted sample in its group; return it unchanged",
        )
