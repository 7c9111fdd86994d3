"""The settings ``--rm-...`` of reward models that ask a service or an auxiliary model, in TOML ``[rewards]``."""

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
"""The section of files in which the settings stood when they were the core's."""


class RewardsOptions(PluginOptions):
    """What is asked for rewards, and how."""

    rm_url: Annotated[
        Name | None, Flag("--rm-url", section=SECTION, value="URL"), UsedBy("remote_rm", required=True)
    ] = None
    """Where reward model remote_rm sends samples; ${NAME} in it is that environment variable. None: nowhere."""
    rm_token_env: Annotated[
        Name | None, Flag("--rm-token-env", section=SECTION, value="VARIABLE"), UsedBy("remote_rm")
    ] = None
    """Environment variable whose value remote_rm sends as "Authorization: Bearer VALUE". None: no such header."""
    rm_row_urls: Annotated[
        tuple[Name, ...], Flag("--rm-row-urls", section=SECTION, value="URL ..."), UsedBy("remote_rm"), Needs("rm_url")
    ] = ()
    """Other services that rows may name as rm_url in their metadata, each in full. Empty: none but the run's rm_url."""
    rm_retry_statuses: Annotated[
        tuple[Refusal, ...], Flag("--rm-retry-statuses", section=SECTION), UsedBy("remote_rm"), Needs("rm_url")
    ] = ()
    """Refusals (4xx) after which remote_rm asks again, such as 429, no earlier than the service's Retry-After says.

    Empty: none. reward_timeout_s is the limit all the same.
    """
    rm_batch_size: Annotated[Count, Flag("--rm-batch-size", section=SECTION), UsedBy("remote_rm")] = 1
    """Samples of a group that remote_rm sends in one question, as a list. 1: each by itself, not as a list."""
    rm_concurrency: Annotated[
        Count, Flag("--rm-concurrency", section=SECTION), UsedBy("remote_rm", "served_rm", "judge")
    ] = 64
    """Questions that reward models which ask a service or a model have under way at once; the rest wait."""
    rm_tokenizer: Annotated[Path | None, Flag("--rm-tokenizer", section=SECTION), UsedBy("served_rm")] = None
    """Folder of a tokenizer whose chat template makes one text of prompt and response for served_rm.

    None: the response follows the prompt as it is.
    """
    rm_judge_prompt: Annotated[Path | None, Flag("--rm-judge-prompt", section=SECTION), UsedBy("judge")] = None
    """Text file that judge sends, with {prompt}, {response} and {label} in it. None: a question for 0 to 10."""
    rm_judge_pattern: Annotated[
        Name | None, Flag("--rm-judge-pattern", section=SECTION, value="REGEX"), UsedBy("judge")
    ] = None
    """Regular expression whose last group, where it matches last, is the judge's number. None: after "Score:"."""
    rm_judge_max_tokens: Annotated[Count, Flag("--rm-judge-max-tokens", section=SECTION), UsedBy("judge")] = 512
    """Longest answer of a judge in tokens, thoughts included; it and the question have to fit the judge's context."""
