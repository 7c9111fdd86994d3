"""Helpers that a custom generate function may import. They work inside the adapter's call, in its tasks and threads.

    from slime_compat import GenerateState, generate_single, get_model_url, post

Importing this loads no engine client and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

from slime_core.errors import PluginError
from slime_core.services import engine_headers, model_url
from slime_core.types import Sample, SpecInfo

__all__ = [
    "CALL",
    "Answer",
    "GenerateState",
    "InsideCall",
    "generate",
    "generate_single",
    "get",
    "get_model_url",
    "post",
]

Conversation = str | Sequence[Mapping[str, Any]]


class Answer(str):
    """The text of one turn, with the ids and log-probabilities that the engine returned.

    Attributes:
        token_ids: as sampled, the end token included.
        log_probs: natural, one an id.
        finish_reason: ``stop``, ``length`` or ``abort``.
        weight_versions: of the weights that sampled it.
        weight_spans: which of them sampled which ids, ``(version, start, end)`` with ``end`` excluded.
        routed_experts: which experts every token so far took; None: not requested.
        spec_info: counters of speculative decoding; None: the engine does none.
        kept: what each id was sampled from; None: from all.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str
    weight_versions: tuple[str, ...]
    weight_spans: tuple[tuple[str, int, int], ...]
    routed_experts: Any
    spec_info: SpecInfo | None
    kept: Any

    @property
    def text(self) -> str:
        """The text as plain ``str``."""
        return str(self)


class InsideCall(Protocol):
    """The state of the adapter's call, for the helpers."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model's folder."""
        ...

    @property
    def sampling_params(self) -> dict[str, Any]:
        """The run's sampling parameters, by SGLang's names, as a new dict."""
        ...

    async def answer(self, conversation: Conversation, sampling_params: Mapping[str, Any]) -> Answer:
        """The next turn of ``conversation``."""
        ...

    async def respond(self, sample: Sample, sampling_params: Mapping[str, Any]) -> Sample:
        """``sample`` with one turn of the model as its response."""
        ...


CALL: ContextVar[InsideCall | None] = ContextVar("slime_custom_generate", default=None)
"""The call of a custom generate function that the running code belongs to."""


async def generate_single(conversation: Conversation, sampling_params: Mapping[str, Any] | None = None) -> Answer:
    """The model's next turn in ``conversation``, a ``str`` that also carries its ids.

    Token in, token out: a conversation that starts with an earlier one and its answer is continued from the ids that
    the engine returned, and only what was added is encoded. A sample whose ``tokens`` the function leaves empty gets
    those of its conversation, with what the function added masked.

    Example::

        async def custom_generate(args, samples, evaluation=False):
            for sample in samples:
                turns = [{"role": "user", "content": sample.prompt}]
                answer = await generate_single(turns)
                turns += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Check it."}]
                sample.response = await generate_single(turns)
            return samples

    Arguments:
        conversation: chat messages, which need ``--apply-chat-template``; or the text so far.
        sampling_params: SGLang's names, instead of the run's. In training they may say where a turn ends, and not how
            likely its tokens are.

    Raises:
        PluginError: called outside a custom generate function, or with another temperature or cut than the run trains.
        EngineError: no engine answered; if the function does not catch it, the sample fails and the run continues.
    """
    return await _inside("generate_single").answer(conversation, sampling_params or {})


async def generate(args: Any, sample: Sample, sampling_params: Mapping[str, Any]) -> Sample:
    """``sample`` with one turn of the model as its response: what the run does without a function.

    Raises:
        PluginError: called outside a custom generate function, or with another temperature or cut than the run trains.
        EngineError: no engine answered; if the function does not catch it, the sample fails and the run continues.
    """
    del args  # slime's functions pass it
    return await _inside("generate").respond(sample, sampling_params)


class GenerateState:
    """Stand-in for slime's class of this name, with the attributes that functions read.

    Attributes:
        args: as handed in.
        tokenizer: of the model's folder.
        sampling_params: the run's sampling parameters, by SGLang's names; a new dict.
    """

    def __init__(self, args: Any) -> None:
        call = _inside("GenerateState")
        self.args = args
        self.tokenizer = call.tokenizer
        self.sampling_params = call.sampling_params


async def post(url: str, payload: Any, headers: Mapping[str, str] | None = None) -> Any:
    """The JSON that ``url`` answers to ``payload``, sent as JSON.

    Raises:
        aiohttp.ClientError: no answer, or one with an error status; if the function lets it pass, the sample fails and
        the run continues.
    """
    import aiohttp

    sent = {**engine_headers(url), **(headers or {})}
    async with aiohttp.ClientSession() as session, session.post(url, json=payload, headers=sent) as response:
        response.raise_for_status()
        return await response.json(content_type=None)


async def get(url: str, headers: Mapping[str, str] | None = None) -> Any:
    """The JSON that ``url`` answers; raises as :func:`post`."""
    import aiohttp

    sent = {**engine_headers(url), **(headers or {})}
    async with aiohttp.ClientSession() as session, session.get(url, headers=sent) as response:
        response.raise_for_status()
        return await response.json(content_type=None)


def get_model_url(args: Any, name: str, endpoint: str = "/generate") -> str:
    """URL of auxiliary model ``name``, one of ``[[engine.engine_models]]``.

    Arguments:
        args: as the function was handed it.
        endpoint: what follows the address.

    Raises:
        ConfigError: the run serves no such model.
    """
    routers: Mapping[str, tuple[str, int]] = args.sglang_model_routers
    return model_url({known: f"http://{host}:{port}" for known, (host, port) in routers.items()}, name, endpoint)


def _inside(name: str) -> InsideCall:
    call = CALL.get()
    if call is None:
        raise PluginError(
            f"{name} works inside the function of --custom-generate-function-path, in its tasks and threads; it was "
            "called elsewhere. Call it there."
        )
    return call
