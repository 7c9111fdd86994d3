"""Counters of speculative decoding of one response."""

from __future__ import annotations

from slime_core.types import SpecInfo

__all__ = ["added"]


def added(first: SpecInfo | None, second: SpecInfo | None) -> SpecInfo | None:
    """The counters of both, for a sample that several answers make up."""
    if first is None or second is None:
        return first or second
    return SpecInfo(
        first.spec_accept_token_num + second.spec_accept_token_num,
        first.spec_draft_token_num + second.spec_draft_token_num,
        first.spec_verify_ct + second.spec_verify_ct,
        first.completion_token_num + second.completion_token_num,
    )
