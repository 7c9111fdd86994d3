"""``custom_generate_function_path``: a function that generates responses, as a generate function over prompt groups."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from slime_compat.calling import call_async
from slime_compat.conversation import Call, sampling_fields
from slime_compat.inside import CALL
from slime_compat.paths import PathOptions
from slime_compat.views import as_in_slime, flattened, originals, render, restore
from slime_core.errors import EngineError, PluginError, RequestRefused
from slime_core.generation import GenerateContext, Parents, SamplingParams
from slime_core.types import PromptGroup, Sample, Status, tools_of

__all__ = ["PathGenerate"]

UNREACHED = (aiohttp.ClientError, ConnectionError, TimeoutError, socket.gaierror, socket.herror)
"""Exceptions that a function raises if a server does not answer: the sample fails, and the run continues."""

UNREACHED_NAMES = frozenset(
    {
        "requests.exceptions.ConnectionError",
        "requests.exceptions.Timeout",
        "requests.exceptions.HTTPError",
        "requests.exceptions.ChunkedEncodingError",
        "httpx.TransportError",
        "httpx.HTTPStatusError",
        "urllib.error.URLError",
        "urllib3.exceptions.HTTPError",
    }
)
"""Such exceptions of libraries that this module does not import but functions may use."""

UNREACHED_ERRNOS = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN})
"""Such error numbers of an ``OSError`` without a subclass."""

UNFINISHED = (Status.ABORTED, Status.FAILED)


class PathGenerate:
    """The function of --custom-generate-function-path.

    ``(args, sample, sampling_params)`` is called once for each sample of a group, concurrently; ``(args, samples)``
    once for the whole group. ``args`` has the router's address.

    At most ``sglang_server_concurrency`` samples for each engine are in flight.

    Raises:
        PluginError: the function cannot be imported or called.
    """

    def __init__(self, options: PathOptions) -> None:
        plan = options.plan
        self._function = options.function("custom_generate_function_path")
        self._args = options.arguments
        self._takes_sample = "sample" in self._function.form.passed
        at_once = int(options.arguments.sglang_server_concurrency) * plan.num_engines
        size = 1 if self._takes_sample else plan.n_samples_per_prompt
        self._room = asyncio.Semaphore(max(1, at_once // size))

    async def __call__(self, context: GenerateContext, samples: PromptGroup, sampling: SamplingParams) -> list[Sample]:
        """Return the finished samples; samples for which no server answered are failed, with the reason.

        Raises:
            PluginError: the function failed, or returned something else than finished samples.
            RequestRefused: an engine will never accept the request of ``generate_single``.
        """
        router = urlsplit(context.client.url)
        self._args.sglang_router_ip, self._args.sglang_router_port = router.hostname, router.port
        parts = [[sample] for sample in samples] if self._takes_sample else [samples]
        finished = await asyncio.gather(*(self._part(context, part, sampling) for part in parts))
        return [sample for part in finished for sample in part]

    async def _part(self, context: GenerateContext, part: list[Sample], sampling: SamplingParams) -> list[Sample]:
        parents = Parents.of(part)
        async with self._room:
            render(part, context.encoder)
            prompts = originals(part)
            inside = Call(context, sampling, tools=tools_of(part[0].metadata), prompts=prompts)
            outer = CALL.set(inside)
            try:
                with as_in_slime(part):
                    returned = await self._called(part, sampling, evaluation=context.evaluation)
            except RequestRefused:
                raise
            except EngineError as failure:
                return [replace(sample, status=Status.FAILED, error=str(failure)) for sample in part]
            except PluginError as failure:
                if not _is_unreached(failure.__cause__):
                    raise
                return [replace(sample, status=Status.FAILED, error=str(failure)) for sample in part]
            finally:
                CALL.reset(outer)
        samples = self._samples(returned)
        restore(samples, part, prompts)
        return self._finished(samples, parents, inside, evaluation=context.evaluation)

    async def _called(self, part: list[Sample], sampling: SamplingParams, *, evaluation: bool) -> Any:
        named = self._function.named(evaluation=evaluation)
        if self._takes_sample:
            return await call_async(self._function, self._args, part[0], sampling_fields(sampling), **named)
        return await call_async(self._function, self._args, part, **named)

    def _finished(self, samples: list[Sample], parents: Parents, inside: Call, *, evaluation: bool) -> list[Sample]:
        """Check the samples that the function returned, and set their group."""
        if self._takes_sample:
            self._share_rollout(samples, parents.numbers[0])
        self._fill(samples, inside)
        parents.adopt(samples)
        for sample in samples:
            if sample.status is Status.PENDING:
                sample.status = Status.COMPLETED
            mistake = None if evaluation or sample.status in UNFINISHED else _incomplete(sample)
            if mistake is not None:
                raise PluginError(f"{self._function}: sample {sample.index} came back {mistake}")
        return samples

    def _samples(self, returned: Any) -> list[Sample]:
        flat = flattened(returned)
        others = [entry for entry in flat if not isinstance(entry, Sample)]
        if others or not flat:
            kind = f"{type(others[0]).__module__}.{type(others[0]).__qualname__}" if others else "no sample"
            raise PluginError(
                f"{self._function}: it returned {kind}; accepted: a slime_core.Sample, or a list of them. Return "
                "the sample that was passed, filled; code for slime imports Sample from slime_core."
            )
        return flat

    def _share_rollout(self, samples: Sequence[Sample], parent: int | None) -> None:
        """Give siblings of one generation one rollout id: the one that the function set, or their parent's."""
        ids = {sample.rollout_id for sample in samples}
        if len(ids) > 1:
            raise PluginError(
                f"{self._function}: for sample {parent} it returned {len(samples)} samples with the rollout "
                f"ids {sorted(map(str, ids))}; siblings share one. Give all of them one rollout_id, or leave it unset."
            )
        if len(samples) > 1 and ids == {None}:
            for sample in samples:
                sample.rollout_id = parent

    def _fill(self, samples: Sequence[Sample], inside: Call) -> None:
        """Fill samples that the function left without tokens from their conversations."""
        unused = [trajectory for trajectory in inside.trajectories if trajectory.answers]
        for sample in samples:
            if sample.response_length or not unused or sample.status in UNFINISHED:
                continue
            fitting = [entry for entry in unused if not sample.response or entry.is_in(sample.response)]
            if not fitting or (len(samples) == 1 and len(unused) > 1):
                raise PluginError(
                    f"{self._function}: sample {sample.index} came back without tokens, and it could be any of "
                    f"{len(unused)} conversations of generate_single; start one conversation for each sample and "
                    "continue it with the answers of generate_single, or set tokens, response_length and "
                    "rollout_log_probs."
                )
            fitting[0].fill(sample, inside.tokenizer)
            unused.remove(fitting[0])


def _is_unreached(failure: BaseException | None) -> bool:
    """Return whether a server did not answer; a file that is missing or unreadable is a mistake of the user."""
    if isinstance(failure, UNREACHED) or getattr(failure, "errno", None) in UNREACHED_ERRNOS:
        return True
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(failure).__mro__}
    return not kinds.isdisjoint(UNREACHED_NAMES)


def _incomplete(sample: Sample) -> str | None:
    """Return the reason why a sample cannot be trained, or None if it can."""
    length = sample.response_length
    if not 0 < length < len(sample.tokens):
        return (
            f"with {len(sample.tokens)} tokens, {length} of them of a response; accepted: the prompt's ids and then "
            "the response's. Set tokens and response_length, or call append_response_tokens, or generate_single."
        )
    for name, values in (("rollout_log_probs", sample.rollout_log_probs), ("loss_mask", sample.loss_mask)):
        if values is None and name == "rollout_log_probs":
            return (
                f"with {length} response tokens and no rollout_log_probs; ask the engine for them with "
                "return_logprob, and keep one for each token, 0.0 for those of tools."
            )
        if values is not None and len(values) != length:
            return f"with {length} response tokens and {len(values)} entries of {name}; accepted: one for each."
    return None
