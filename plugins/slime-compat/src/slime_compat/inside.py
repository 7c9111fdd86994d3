"""Helpers that a custom generate function may import. They work only inside the adapter's call, its tasks and threads.

    from slime_compat import GenerateState, generate_single, get_model_url, post

Every command imports this module, so it imports no HTTP library, engine client or tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from slime_core.errors import PluginError

if TYPE_CHECKING:
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
        token_ids: the sampled ids, including the end token.
        log_probs: natural log-probability of each id.
        finish_reason: ``stop``, ``length`` or ``abort``.
        weight_versions: versions of the weights that sampled it.
        weight_spans: version of each range of ids, ``(version, start, end)`` with ``end`` excluded.
        routed_experts: experts of every token so far; None if not requested.
        spec_info: counters of speculative decoding; None if the engine does not use it.
        kept: truncated-sampling candidates of each id; None means the whole vocabulary.
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
        """Sample the next turn of ``conversation``."""
        ...

    async def respond(self, sample: Sample, sampling_params: Mapping[str, Any]) -> Sample:
        """Sample one turn as the response of ``sample``."""
        ...


CALL: ContextVar[InsideCall | None] = ContextVar("slime_custom_generate", default=None)
"""The current call of a custom generate function; None if the code runs outside of one."""


async def generate_single(conversation: Conversation, sampling_params: Mapping[str, Any] | None = None) -> Answer:
    """Sample the model's next turn in ``conversation``; returns a ``str`` with its ids.

    Token in, token out: a conversation that starts with an earlier one and its answer is continued from the ids that
    the engine returned, and only the added text is encoded. If the function leaves ``tokens`` of a sample empty, they
    are filled from its conversation, with the added text masked.

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
        sampling_params: override the run's, by SGLang's names. In training they may change the end of a turn, but not
            the probabilities of its tokens.

    Raises:
        PluginError: called outside a custom generate function, or with another temperature or top-p than the run's.
        EngineError: no engine answered; if the function does not catch it, the sample fails and the run continues.
    """
    return await _inside("generate_single").answer(conversation, sampling_params or {})


async def generate(args: Any, sample: Sample, sampling_params: Mapping[str, Any]) -> Sample:
    """Sample one turn as the response of ``sample``, as a run without a function does.

    Raises:
        PluginError: called outside a custom generate function, or with another temperature or top-p than the run's.
        EngineError: no engine answered; if the function does not catch it, the sample fails and the run continues.
    """
    del args  # part of slime's signature
    return await _inside("generate").respond(sample, sampling_params)


class GenerateState:
    """Replacement for slime's class of this name, with the attributes that functions use.

    Attributes:
        args: the given ``args``.
        tokenizer: tokenizer of the model's folder.
        sampling_params: the run's sampling parameters, by SGLang's names; a new dict.
    """

    def __init__(self, args: Any) -> None:
        call = _inside("GenerateState")
        self.args = args
        self.tokenizer = call.tokenizer
        self.sampling_params = call.sampling_params


async def post(url: str, payload: Any, headers: Mapping[str, str] | None = None) -> Any:
    """Send ``payload`` as JSON to ``url`` and return the JSON answer.

    Raises:
        aiohttp.ClientError: no answer, or an error status; if the function does not catch it, the sample fails and the
        run continues.
    """
    return await _request("POST", url, headers, payload)


async def get(url: str, headers: Mapping[str, str] | None = None) -> Any:
    """Return the JSON answer of ``url``; raises as :func:`post`."""
    return await _request("GET", url, headers)


async def _request(method: str, url: str, headers: Mapping[str, str] | None, payload: Any = None) -> Any:
    import aiohttp

    from slime_core.services import engine_headers

    sent = {**engine_headers(url), **(headers or {})}
    async with aiohttp.ClientSession() as session, session.request(method, url, json=payload, headers=sent) as response:
        response.raise_for_status()
        return await response.json(content_type=None)


def get_model_url(args: Any, name: str, endpoint: str = "/generate") -> str:
    """Return the URL of auxiliary model ``name``, one of ``[[engine.engine_models]]``.

    Arguments:
        args: the ``args`` that the function got.
        endpoint: path to append to the address.

    Raises:
        ConfigError: the run serves no model of this name.
    """
    from slime_core.services import model_url

    routers: Mapping[str, tuple[str, int]] = args.sglang_model_routers
    return model_url({model: f"http://{host}:{port}" for model, (host, port) in routers.items()}, name, endpoint)


def _inside(name: str) -> InsideCall:
    call = CALL.get()
    if call is None:
        raise PluginError(
            f"{name} works inside the function of --custom-generate-function-path, in its tasks and threads; it was "
            "called elsewhere. Call it there."
        )
    return call
