"""Reward models that send requests: to a service at a URL, a neural reward model, or a judge.

    RemoteReward   a service at ``--rm-url``, which gets prompt, response and label and returns the reward
    ServedReward   an auxiliary model with one output, served by the run (``--rm-model``)
    JudgeReward    an auxiliary language model, served by the run, that writes a score

All run in the sampler, and a failure concerns one sample. Requests go through :class:`slime_core.services.Service`.
"""

from __future__ import annotations

import asyncio
import math
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

import regex

from slime_core import RunView
from slime_core.errors import ConfigError, ServiceError
from slime_core.services import Service, model_url
from slime_core.types import JsonValue, Reward, RewardFailure, Sample
from slime_rewards.checks import RM_URL, not_allowed
from slime_rewards.options import RewardsOptions

__all__ = ["JudgeReward", "RemoteReward", "ServedReward", "filled"]

JUDGE = """Judge the answer to the question below.

Question:
{prompt}

Answer to judge:
{response}

Correct answer, if one is known: {label}

How good is the answer, from 0 (wrong or useless) to 10 (right and complete)? End with one line: Score: NUMBER
"""

SCORE = r"(?i:score)\W*(-?\d+(?:\.\d+)?)"
"""Finds a judge's score unless ``rm_judge_pattern`` is set; the last match is used."""

PATTERN_LIMIT_S = 1.0
"""Time limit of the pattern's search, in seconds; a pattern with nested repetitions can backtrack without end."""

TOO_LONG = "context length"
"""Part of an engine's message about a question that does not fit (sglang 0.5.23, srt/managers/tokenizer_manager.py,
``_validate_one_request``)."""

TIMEOUT_S = 30.0
"""Time limit of a request if the settings have none, as in a test of a reward model alone."""

PASSING = (408, 425, 429)
"""HTTP statuses that are not about the request itself: too slow, too early, too many."""

_PLACE = re.compile(r"\{(prompt|response|label)\}")

Answers = list[Reward | RewardFailure]


class RemoteReward:
    """The answer of an HTTP service that gets prompt, response and label (``--rm-url``).

    Samples go to the service at ``rm_url``, or at the URL among ``rm_row_urls`` that a row names as ``rm_url`` in its
    metadata: up to ``rm_batch_size`` samples of a group in one request. One sample is ``{"prompt": ..., "response":
    ..., "label": ...}``, and its answer a number or a table of numbers. For several samples, both request and answer
    are lists of these.

    Arguments:
        options: ``rm_url`` and the settings of its requests.
        run: its setting ``reward_timeout_s`` is the time limit of a request.

    Raises:
        ConfigError: ``rm_url`` is None, or it names an environment variable that is not set.
    """

    def __init__(self, options: RewardsOptions, run: RunView) -> None:
        if options.rm_url is None:
            raise ConfigError("rm_type needs a service, but rm_url is not set; add --rm-url URL")
        self._batch = options.rm_batch_size
        self._url = options.rm_url
        # A row may only choose among these URLs: data must not make the run send requests to any other.
        urls = (options.rm_url, *options.rm_row_urls)
        limits: dict[str, Any] = {"token_env": options.rm_token_env, "retry_statuses": options.rm_retry_statuses}
        self._services = {url: _service(url, options, run, **limits) for url in urls}

    async def score(self, samples: Sequence[Sample]) -> Answers:
        """Return one reward or failure a sample, in order."""
        by_url: dict[str, list[int]] = {}
        for place, sample in enumerate(samples):
            by_url.setdefault(str(sample.metadata.get(RM_URL) or self._url), []).append(place)
        parts = [(url, at[start : start + self._batch]) for url, at in by_url.items() for start in self._starts(at)]
        answers = await asyncio.gather(*(self._part(url, [samples[place] for place in at]) for url, at in parts))
        pairs = [pair for (_, at), each in zip(parts, answers, strict=True) for pair in zip(at, each, strict=True)]
        return [answer for _, answer in sorted(pairs, key=lambda pair: pair[0])]

    def _starts(self, places: Sequence[int]) -> range:
        return range(0, len(places), self._batch)

    async def _part(self, url: str, samples: Sequence[Sample]) -> Answers:
        if url in self._services:
            return await self._ask(self._services[url], samples)
        return [RewardFailure("refused", f"its row names {not_allowed(url, tuple(self._services))}")] * len(samples)

    async def _ask(self, service: Service, samples: Sequence[Sample]) -> Answers:
        rows: list[JsonValue] = [
            {"prompt": sample.prompt, "response": sample.response, "label": sample.label} for sample in samples
        ]
        try:
            answer = await service.ask(rows if self._batch > 1 else rows[0])
        except ServiceError as error:
            return [_failure(error, _retry_hint(error))] * len(samples)
        rewards = answer if self._batch > 1 else [answer]
        if not isinstance(rewards, list) or len(rewards) != len(samples):
            mistake = f"{service.quote(answer)}; accepted: a list of {len(samples)} rewards"
            return [RewardFailure("invalid", mistake)] * len(samples)
        return [self._reward(service, reward) for reward in rewards]

    def _reward(self, service: Service, reward: Any) -> Reward | RewardFailure:
        if _is_number(reward):
            return float(reward)
        # A table may also contain texts, as slime's services send them.
        entries = reward.items() if isinstance(reward, dict) else ()
        numbers = {name: value for name, value in entries if isinstance(value, int | float)}
        if numbers and all(map(_is_number, numbers.values())):
            return {name: float(value) for name, value in numbers.items()}
        return RewardFailure(
            "invalid", f"{service.quote(reward)}; accepted: a finite number, or a table of them with --reward-key"
        )


class ServedReward:
    """The output of a neural reward model that the run serves as an auxiliary model (``--rm-model``).

    Its input is prompt and response, joined by the chat template of ``rm_tokenizer``.

    Arguments:
        options: ``rm_tokenizer`` and ``rm_concurrency``.
        run: its ``models``, and its settings ``rm_model``, ``reward_timeout_s`` and ``trust_remote_code``.

    Raises:
        ConfigError: ``rm_model`` is not set, or is not one of ``models``.
    """

    def __init__(self, options: RewardsOptions, run: RunView) -> None:
        self._name, url = _model(run, "/v1/embeddings")
        self._folder = options.rm_tokenizer
        self._trusts = run.settings.get("trust_remote_code") is True
        self._service = _service(url, options, run)

    async def score(self, samples: Sequence[Sample]) -> Answers:
        """Return one reward or failure a sample, in order."""
        return list(await asyncio.gather(*map(self._one, samples)))

    async def _one(self, sample: Sample) -> Reward | RewardFailure:
        # SGLang's embeddings endpoint returns the output of the model's head, the reward; the router passes it on.
        try:
            text = self._text(sample)
        except Exception as error:  # a chat template is code of the model's author and may raise anything
            problem = f"making one text of prompt and response failed with {type(error).__name__}: {error}"
            return RewardFailure("invalid", f"the chat template of {self._folder}: {problem}")
        try:
            answer = await self._service.ask({"model": self._name, "input": text})
        except ServiceError as error:
            return _failure(error)
        match answer:
            case {"data": [{"embedding": [reward]}]} if _is_number(reward):
                return float(reward)
        return RewardFailure("invalid", f"model {self._name!r} answered {answer!r:.200}; accepted: one finite number")

    def _text(self, sample: Sample) -> str:
        if self._folder is None:
            return _text_of(sample.prompt) + sample.response
        prompt = sample.prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        messages.append({"role": "assistant", "content": sample.response})
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False))

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._folder, trust_remote_code=self._trusts)


class JudgeReward:
    """The score that a language model, served as an auxiliary model, writes about a response (``--rm-model``).

    Its answer is sampled greedily.

    Arguments:
        options: ``rm_judge_prompt`` is the file with the question; ``rm_judge_pattern`` finds the score in the
            answer.
        run: its ``models``, and its settings ``rm_model`` and ``reward_timeout_s``.

    Raises:
        ConfigError: ``rm_model`` is not set, or is not one of ``models``.
    """

    def __init__(self, options: RewardsOptions, run: RunView) -> None:
        self._name, url = _model(run, "/v1/chat/completions")
        self._question = JUDGE if options.rm_judge_prompt is None else _read(options.rm_judge_prompt)
        self._pattern = regex.compile(options.rm_judge_pattern or SCORE)
        self._max_tokens = options.rm_judge_max_tokens
        self._service = _service(url, options, run)

    async def score(self, samples: Sequence[Sample]) -> Answers:
        """Return one reward or failure a sample, in order."""
        return list(await asyncio.gather(*map(self._one, samples)))

    async def _one(self, sample: Sample) -> Reward | RewardFailure:
        messages = [{"role": "user", "content": filled(self._question, sample)}]
        try:
            answer = await self._service.ask(
                {"model": self._name, "messages": messages, "temperature": 0.0, "max_tokens": self._max_tokens}
            )
        except ServiceError as error:
            return _failure(error)
        match answer:
            case {"choices": [{"message": {"content": str(text)}}]}:
                return await self._number(text)
        return RewardFailure("invalid", f"judge {self._name!r} answered {answer!r:.200}; accepted: a chat completion")

    async def _number(self, text: str) -> Reward | RewardFailure:
        answered = f"judge {self._name!r} wrote {text[-200:]!r}"
        try:
            number = await asyncio.to_thread(self._last_number, text)
        except TimeoutError:
            slow = f"rm_judge_pattern = {self._pattern.pattern!r} took more than {PATTERN_LIMIT_S:g} s to look through"
            return RewardFailure(
                "timeout", f"{answered}, which {slow}; give one with fewer repetitions inside each other"
            )
        if math.isfinite(number):
            return number
        return RewardFailure("invalid", f"{answered}; accepted: a number where {self._pattern.pattern!r} finds it")

    def _last_number(self, text: str) -> float:
        """Return the last number that the pattern finds, or NaN. Runs in a thread and releases the interpreter's lock,
        so that other answers are processed meanwhile."""
        matches = list(self._pattern.finditer(text, timeout=PATTERN_LIMIT_S, concurrent=True))
        try:
            return float(matches[-1][matches[-1].lastindex or 0])
        except (IndexError, TypeError, ValueError):
            return math.nan


def filled(template: str, sample: Sample) -> str:
    """Replace ``{prompt}``, ``{response}`` and ``{label}`` in ``template``; other braces are kept."""
    texts = {"prompt": _text_of(sample.prompt), "response": sample.response, "label": sample.label or "unknown"}
    return _PLACE.sub(lambda place: texts[place[1]], template)


def _model(run: RunView, endpoint: str) -> tuple[str, str]:
    name = run.settings.get("rm_model")
    if not isinstance(name, str):
        raise ConfigError(
            f"rm_type needs an auxiliary model, but rm_model is not set; add --rm-model NAME. Auxiliary models of the "
            f"run (--engine-models): {', '.join(sorted(run.models)) or 'none'}"
        )
    return name, model_url(run.models, name, endpoint)


def _failure(error: ServiceError, hint: str = "") -> RewardFailure:
    """Convert ``error`` to a sample's failure; its cause is ``too_long`` if the text exceeds the model's context."""
    limit = "; --reward-timeout-s sets the limit" if error.gave_up else ""
    is_long = error.cause == "refused" and TOO_LONG in str(error)
    return RewardFailure("too_long" if is_long else error.cause, f"{error}{limit}{hint}")


def _retry_hint(error: ServiceError) -> str:
    is_passing = error.status in PASSING and not error.gave_up
    return f"; --rm-retry-statuses {error.status} asks again after it" if is_passing else ""


def _service(url: str, options: RewardsOptions, run: RunView, **limits: Any) -> Service:
    timeout_s = run.settings.get("reward_timeout_s", TIMEOUT_S)
    if not isinstance(timeout_s, int | float):
        raise TypeError(f"reward_timeout_s is {timeout_s!r}; accepted: a number of seconds")
    return Service(url, timeout_s=timeout_s, max_in_flight=options.rm_concurrency, **limits)


def _text_of(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(prompt, str):
        return prompt
    return "".join(f"{message.get('role')}: {message.get('content')}\n" for message in prompt)


def _is_number(value: object) -> TypeGuard[int | float]:
    # math.isfinite raises for integers that are too large for a float.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"rm_judge_prompt = {path} cannot be read: {error}. Give a text file.") from error
