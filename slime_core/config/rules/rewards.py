"""The rules of rewards."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from slime_core.config.reward_sum import reward_terms
from slime_core.config.rules.layout import Rule
from slime_core.config.schema import RunConfig

__all__ = ["REWARDS"]


def _sums_can_be_read(config: RunConfig) -> Iterator[str]:
    try:
        reward_terms(config.rollout.rm_type)
    except ValueError as error:
        yield f"rm_type = {error}"


def _sums_of_evaluation_sets_can_be_read(config: RunConfig) -> Iterator[str]:
    for one in config.eval.eval_datasets:
        try:
            reward_terms(one.rm_type or "")
        except ValueError as error:
            yield f"evaluation set {one.name}: rm_type = {error}"


def _services_can_be_asked(config: RunConfig) -> Iterator[str]:
    url = config.rollout.rm_url
    if url is None:
        return
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        yield "rm_url is no address of a service; accepted is http://HOST:PORT/PATH, or the same with https"
    elif parts.password and not parts.password.startswith("${"):
        yield (
            f"rm_url holds a password for {parts.hostname}, which the record of the run would show; export it and "
            "write ${NAME} in its place"
        )


def _judges_can_be_read(config: RunConfig) -> Iterator[str]:
    pattern, prompt = config.rollout.rm_judge_pattern, config.rollout.rm_judge_prompt
    try:
        re.compile(pattern or "")
    except re.error as error:
        yield f"rm_judge_pattern = {pattern!r} is no regular expression: {error}"
    if prompt is not None and not prompt.is_file():
        yield f"rm_judge_prompt = {prompt} is no file; give a text file with {{prompt}} and {{response}} in it"


def _tokenizers_are_there(config: RunConfig) -> Iterator[str]:
    folder = config.rollout.rm_tokenizer
    if folder is not None and not folder.is_dir():
        yield f"rm_tokenizer = {folder} is no folder; give the Hugging Face folder of the reward model"


REWARDS: dict[Rule, str] = {
    _sums_can_be_read: "rm_type",
    _sums_of_evaluation_sets_can_be_read: "eval_datasets",
    _services_can_be_asked: "rm_url",
    _judges_can_be_read: "rm_judge_pattern rm_judge_prompt",
    _tokenizers_are_there: "rm_tokenizer",
}
"""Rule -> the settings it reads."""
