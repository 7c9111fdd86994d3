"""Counters of speculative decoding: from an engine's answer to a sample, and over a rollout.

A draft proposes tokens, the model verifies them in one pass and keeps those that it would have drawn itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from slime_core.types import Sample, SpecInfo

__all__ = ["spec_info", "spec_metrics"]


def spec_info(meta: Mapping[str, Any]) -> SpecInfo | None:
    """What an answer's ``meta_info`` says of it (sglang 0.5.23, srt/managers/tokenizer_manager.py:3150); None: the
    engine does not speculate."""
    if "spec_verify_ct" not in meta:
        return None
    return SpecInfo(
        spec_accept_token_num=int(meta.get("spec_num_correct_drafts", 0)),
        spec_draft_token_num=int(meta.get("spec_num_proposed_drafts", 0)),
        spec_verify_ct=int(meta["spec_verify_ct"]),
        completion_token_num=int(meta.get("completion_tokens", 0)),
    )


def spec_metrics(samples: Iterable[Sample]) -> dict[str, float]:
    """``rollout/spec/accept_rate``, accepted of the drafted tokens, and ``rollout/spec/accept_length``, tokens a
    verification pass; none where no engine speculates."""
    infos = [sample.spec_info for sample in samples if sample.spec_info.spec_verify_ct]
    if not infos:
        return {}
    drafted, passes = (sum(info.spec_draft_token_num for info in infos), sum(info.spec_verify_ct for info in infos))
    accepted, tokens = (
        sum(info.spec_accept_token_num for info in infos),
        sum(info.completion_token_num for info in infos),
    )
    return {
        "rollout/spec/accept_rate": accepted / drafted if drafted else 0.0,
        "rollout/spec/accept_length": tokens / passes,
    }
