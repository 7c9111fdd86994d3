"""The settings ``--rm-...`` of reward models that call a service or an auxiliary model, in TOML ``[rewards]``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from slime_core import Flag, Needs, PluginOptions, UsedBy

__all__ = ["RewardsOptions"]

Count = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(min_length=1)]
Refusal = Annotated[int, Field(ge=400, le=499)]
SECTION = "rollout"
"""The TOML section that older files use for these settings."""


class RewardsOptions(PluginOptions):
    """Services and models that score responses, and how they are called."""

    rm_url: Annotated[
        Name | None, Flag("--rm-url", section=SECTION, value="URL"), UsedBy("remote_rm", required=True)
    ] = None
    """URL to which reward model remote_rm sends samples; ${NAME} is replaced by that environment variable. None:
    no service."""
    rm_token_env: Annotated[
        Name | None, Flag("--rm-token-env", section=SECTION, value="VARIABLE"), UsedBy("remote_rm")
    ] = None
    """Environment variable whose value remote_rm sends as "Authorization: Bearer VALUE". None: no such header."""
    rm_row_urls: Annotated[
        tuple[Name, ...], Flag("--rm-row-urls", section=SECTION, value="URL ..."), UsedBy("remote_rm"), Needs("rm_url")
    ] = ()
    """Other URLs that a row may name as rm_url in its metadata, to be scored there. Empty: only the run's rm_url."""
    rm_retry_statuses: Annotated[
        tuple[Refusal, ...], Flag("--rm-retry-statuses", section=SECTION), UsedBy("remote_rm"), Needs("rm_url")
    ] = ()
    """Refusals (4xx) after which remote_rm retries, such as 429, no earlier than the service's Retry-After says.

    Empty: none. reward_timeout_s still limits the whole request.
    """
    rm_batch_size: Annotated[Count, Flag("--rm-batch-size", section=SECTION), UsedBy("remote_rm")] = 1
    """Samples of a group that remote_rm sends in one request, as a list. 1: one sample per request, not as a list."""
    rm_concurrency: Annotated[
        Count, Flag("--rm-concurrency", section=SECTION), UsedBy("remote_rm", "served_rm", "judge")
    ] = 64
    """Limit on concurrent requests of remote_rm, served_rm or judge; other requests wait."""
    rm_tokenizer: Annotated[Path | None, Flag("--rm-tokenizer", section=SECTION), UsedBy("served_rm")] = None
    """Folder of the tokenizer whose chat template joins prompt and response for served_rm.

    None: the response follows the prompt directly.
    """
    rm_judge_prompt: Annotated[Path | None, Flag("--rm-judge-prompt", section=SECTION), UsedBy("judge")] = None
    """Text file with the question that reward model judge sends, with {prompt}, {response} and {label}. None:
    a built-in question for a score of 0 to 10."""
    rm_judge_pattern: Annotated[
        Name | None, Flag("--rm-judge-pattern", section=SECTION, value="REGEX"), UsedBy("judge")
    ] = None
    """Regular expression that finds the score in the judge's answer: the last group of its last match. None: the number
    after "Score:"."""
    rm_judge_max_tokens: Annotated[Count, Flag("--rm-judge-max-tokens", section=SECTION), UsedBy("judge")] = 512
    """Maximum tokens of a judge's answer, including thoughts; with the question it must fit the judge's context."""
