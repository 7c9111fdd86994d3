"""Checks the settings of a run, and the rows of its prompts, before the run starts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from slime_core import RunPlan
from slime_core.types import JsonValue
from slime_rewards.options import RewardsOptions

__all__ = ["RM_URL", "mistakes", "not_allowed", "row_mistakes"]

RM_URL = "rm_url"
"""Metadata key of a row: the service that scores the row, one of those that the settings allow."""

TRUNCATES = "allow_auto_truncate"
"""SGLang's flag that makes an engine truncate a request that does not fit instead of refusing it."""


def mistakes(plan: RunPlan, options: RewardsOptions) -> Iterator[str]:
    """Yield a message for each mistake in the settings; messages show no secrets."""
    yield from _of_addresses(options)
    yield from _of_token(options)
    yield from _of_judge(options)
    if options.rm_tokenizer is not None and not options.rm_tokenizer.is_dir():
        yield f"rm_tokenizer = {options.rm_tokenizer} is not a folder; give the Hugging Face folder of the reward model"
    yield from _too_long_to_judge(plan, options)


def _of_addresses(options: RewardsOptions) -> Iterator[str]:
    if options.rm_url is None:
        return
    from slime_core.services import missing_secrets, url_mistakes  # here, because it imports aiohttp

    for setting, url in [("rm_url", options.rm_url), *(("rm_row_urls", url) for url in options.rm_row_urls)]:
        yield from (f"{setting} {mistake}" for mistake in url_mistakes(url, header="--rm-token-env NAME"))
        yield from (_unset(setting, name) for name in missing_secrets(url))


def _of_token(options: RewardsOptions) -> Iterator[str]:
    name = options.rm_token_env
    if name is None:
        return
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        yield (
            "rm_token_env is not the name of a variable; accepted: the name, such as RM_TOKEN, and never the "
            "secret itself"
        )
    elif name not in os.environ:
        yield _unset("rm_token_env", name)


def _unset(setting: str, name: str) -> str:
    return (
        f"{setting} names the environment variable {name}, which holds a secret of the service and is not set. Export "
        "it before the run, on a cluster in the runtime environment of the job"
    )


def _of_judge(options: RewardsOptions) -> Iterator[str]:
    pattern, prompt = options.rm_judge_pattern, options.rm_judge_prompt
    if pattern is not None:
        import regex  # the library that a run uses: unlike ``re``, its searches have a time limit

        try:
            regex.compile(pattern)
        except regex.error as error:
            yield f"rm_judge_pattern = {pattern!r} is not a regular expression: {error}"
    if prompt is not None and not prompt.is_file():
        yield f"rm_judge_prompt = {prompt} is not a file; give a text file with {{prompt}} and {{response}} in it"


def _too_long_to_judge(plan: RunPlan, options: RewardsOptions) -> Iterator[str]:
    """Check that a response of maximum length, in tokens of the policy, leaves room for question and answer."""
    name, served = plan.settings.get("rm_model"), plan.settings.get("engine_models")
    models = [model for model in served if isinstance(model, dict)] if isinstance(served, list) else []
    for model in (model for model in models if model.get("name") == name):
        reads = _context_length(Path(str(model.get("model_path"))))
        if reads is None or _truncates(model):
            continue
        is_embedding = model.get("is_embedding") is True
        writes = 0 if is_embedding else options.rm_judge_max_tokens
        if plan.max_response_len + writes >= reads:
            answer = "" if is_embedding else f" and its answer rm_judge_max_tokens = {writes}"
            yield (
                f"rm_model = {name} reads at most {reads} tokens, question and answer together; a response may "
                f"have rollout_max_response_len = {plan.max_response_len}{answer}, which leaves no room for "
                f"the question. Lower {'it' if is_embedding else 'one of the two'}, or name a model that reads "
                f"more; with overrides = {{ {TRUNCATES} = true }} in its table [[engine.engine_models]] questions "
                "are truncated"
            )


def _truncates(model: Mapping[str, JsonValue]) -> bool:
    """Return whether the model's engines truncate a question that does not fit."""
    groups = model.get("engine_groups")
    tables = [model, *(groups if isinstance(groups, list) else ())]
    overrides = [table.get("overrides") for table in tables if isinstance(table, dict)]
    pairs = [pair for entries in overrides if isinstance(entries, list) for pair in entries]
    return any(isinstance(pair, list) and pair[:1] == [TRUNCATES] for pair in pairs)


def _context_length(folder: Path) -> int | None:
    """Return the model's context length in tokens; None if unknown, as with scaled rotary embeddings."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_plain = isinstance(config, dict) and not config.get("rope_scaling")
    number = config.get("max_position_embeddings") if is_plain else None
    return number if isinstance(number, int) and number > 0 else None


def row_mistakes(metadata: Mapping[str, JsonValue], options: RewardsOptions) -> Iterator[str]:
    """Yield a message if the row's ``rm_url`` is not allowed; without a service in the run, it is not used."""
    url = metadata.get(RM_URL)
    if url and options.rm_url is not None and url not in (allowed := (options.rm_url, *options.rm_row_urls)):
        yield f"metadata {not_allowed(url, allowed)}"


def not_allowed(url: object, allowed: Collection[str]) -> str:
    """Return the message about a row's address that the run does not allow."""
    from slime_core.services import shown

    return (
        f"{RM_URL} = {url!r:.100}, which is none of the services that the run may ask: "
        f"{', '.join(map(shown, allowed))}. Correct the row, or allow the service with --rm-row-urls URL."
    )
