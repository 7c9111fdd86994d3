"""The rules of rewards."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from slime_core.config.described import context_length
from slime_core.config.reward_sum import reward_terms
from slime_core.config.rules.layout import Rule
from slime_core.config.schema import RunConfig
from slime_core.config.secrets import written_out

__all__ = ["REWARDS"]

CUTS = "allow_auto_truncate"
"""SGLang's flag with which an engine cuts what does not fit rather than refuse it."""


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
    if config.rollout.rm_url is not None:
        yield from _unusable("rm_url", config.rollout.rm_url)
    for url in config.rollout.rm_row_urls:
        yield from _unusable("rm_row_urls", url)


def _unusable(setting: str, url: str) -> Iterator[str]:
    """What is wrong with an address; the message does not show it, since it may hold a secret."""
    host = _host(url)
    if host is None:
        yield f"{setting} is no address of a service; accepted is http://HOST:PORT/PATH, or the same with https"
        return
    for what in written_out(url):
        yield (
            f"{setting} holds {what} for {host} written out, which the record of the run would show; export it and "
            "write ${NAME} in its place, or have it sent as a header with --rm-token-env NAME"
        )


def _host(url: str) -> str | None:
    """None: ``url`` is no address."""
    try:
        parts = urlsplit(url)
        has_port = parts.port is None or parts.port > 0
    except ValueError:
        return None
    return parts.hostname if parts.scheme in ("http", "https") and has_port else None


def _tokens_are_named(config: RunConfig) -> Iterator[str]:
    name = config.rollout.rm_token_env
    if name is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        yield (
            "rm_token_env is no name of an environment variable; accepted is the name, such as RM_TOKEN, and never the "
            "secret itself"
        )


def _there_is_a_service(config: RunConfig) -> Iterator[str]:
    urls = config.rollout.rm_row_urls
    if urls and config.rollout.rm_url is None:
        yield (
            "rm_row_urls says which services rows may name besides rm_url, which is not set; add --rm-url URL, for "
            "rows that name none"
        )
    if config.rollout.rm_retry_statuses and config.rollout.rm_url is None:
        yield "rm_retry_statuses says when rm_url is asked again, which is not set; add --rm-url URL, or leave it out"


def _judges_can_be_read(config: RunConfig) -> Iterator[str]:
    pattern, prompt = config.rollout.rm_judge_pattern, config.rollout.rm_judge_prompt
    if pattern is not None:
        yield from _no_pattern(pattern)
    if prompt is not None and not prompt.is_file():
        yield f"rm_judge_prompt = {prompt} is no file; give a text file with {{prompt}} and {{response}} in it"


def _no_pattern(pattern: str) -> Iterator[str]:
    import regex  # what looks for it in a run: it can be told to stop, and ``re`` cannot

    try:
        regex.compile(pattern)
    except regex.error as error:
        yield f"rm_judge_pattern = {pattern!r} is no regular expression: {error}"


def _tokenizers_are_there(config: RunConfig) -> Iterator[str]:
    folder = config.rollout.rm_tokenizer
    if folder is not None and not folder.is_dir():
        yield f"rm_tokenizer = {folder} is no folder; give the Hugging Face folder of the reward model"


def _responses_can_be_judged(config: RunConfig) -> Iterator[str]:
    """A response of full length, as the policy's tokenizer counts, leaves room for the question and the answer."""
    rollout = config.rollout
    for model in (one for one in config.engine.engine_models if one.name == rollout.rm_model):
        reads = context_length(model.model_path)
        if reads is None or any(name == CUTS for one in model.groups for name, _ in one.overrides):
            continue
        writes = 0 if model.is_embedding else rollout.rm_judge_max_tokens
        if rollout.rollout_max_response_len + writes >= reads:
            answer = "" if model.is_embedding else f" and its answer rm_judge_max_tokens = {writes}"
            yield (
                f"rm_model = {model.name} reads at most {reads} tokens, question and answer together; a response may "
                f"have rollout_max_response_len = {rollout.rollout_max_response_len}{answer}, which leaves no room for "
                f"the question. Lower {'it' if model.is_embedding else 'one of the two'}, or name a model that reads "
                f"more; with overrides = {{ {CUTS} = true }} in its table [[engine.engine_models]] it is asked less"
            )


REWARDS: dict[Rule, str] = {
    _sums_can_be_read: "rm_type",
    _sums_of_evaluation_sets_can_be_read: "eval_datasets",
    _services_can_be_asked: "rm_url rm_row_urls",
    _tokens_are_named: "rm_token_env",
    _there_is_a_service: "rm_url rm_row_urls rm_retry_statuses",
    _judges_can_be_read: "rm_judge_pattern rm_judge_prompt",
    _tokenizers_are_there: "rm_tokenizer",
    _responses_can_be_judged: "rm_model engine_models rm_judge_max_tokens rollout_max_response_len",
}
"""Rule -> the settings it reads."""
