"""Sampling parameters of single rows."""

from __future__ import annotations

from typing import Any

import pytest

from slime_core.errors import DataError
from slime_core.prompts.row_checks import own_sampling

OF_RUN = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}


def own(requested: Any, *, of_run: dict[str, float] | None = None) -> dict[str, Any]:
    return own_sampling({"sampling_params": requested}, of_run=of_run, where="x.jsonl, line 3")


def test_a_row_says_what_it_wants_and_one_without_says_nothing() -> None:
    assert own({"stop": "X", "max_new_tokens": 4, "stop_token_ids": 7}) == {
        "stop": ("X",),
        "max_new_tokens": 4,
        "stop_token_ids": (7,),
    }
    assert own({"temperature": 0, "json_schema": "{}"}) == {"temperature": 0.0, "json_schema": "{}"}
    assert own_sampling({"carries": 1}, of_run=OF_RUN, where="") == own(None, of_run=OF_RUN) == {}


def test_in_training_a_row_says_where_a_response_ends_and_repeats_the_distribution() -> None:
    requested = {"max_new_tokens": 4, "stop": ["X"], "temperature": 1.0, "top_k": -1}
    assert own(requested, of_run=OF_RUN) == {**requested, "stop": ("X",)}


@pytest.mark.parametrize(
    ("requested", "found"),
    [
        ("greedy", "found 'greedy'"),
        ({"max_tokens": 4}, "max_tokens = 4: "),
        ({"top_p": 2}, "top_p = 2: "),
        ({"stop": [""]}, r"stop = \[''\]: "),
    ],
)
def test_wrong_sampling_params_are_refused(requested: Any, found: str) -> None:
    with pytest.raises(DataError, match=rf"^x\.jsonl, line 3: metadata sampling_params: {found}"):
        own(requested)


@pytest.mark.parametrize(
    ("requested", "found"),
    [
        ({"temperature": 0.7}, "temperature = 0.7, .* 1."),
        ({"top_p": 0.9}, "top_p = 0.9, .* 1."),
        ({"repetition_penalty": 1.0}, "repetition_penalty = 1.0 "),
    ],
)
def test_another_distribution_is_refused_in_training_with_what_may_be_set(requested: Any, found: str) -> None:
    assert own(requested) != {}
    settable = "ignore_eos, max_new_tokens, min_new_tokens, stop, stop_token_ids;"
    with pytest.raises(DataError, match=rf"^x\.jsonl, line 3: metadata sampling_params: {found}.* {settable}"):
        own(requested, of_run=OF_RUN)
