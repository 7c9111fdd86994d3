"""Token ids in, token ids and log-probabilities out, through the router to whichever engine has room.

One connection pool, a bound on the requests in flight, and retries with growing pauses: an engine that dies or restarts
costs time, not a sample. A refusal (4xx) is never sent again. Requests can be ended from here with the tokens that they
have (:meth:`GenerateClient.ended`). Concurrency: everything runs in one event loop.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import aiohttp

from slime_core.errors import EngineError, RequestFailed, RequestRefused
from slime_core.generation import Generation, SamplingParams
from slime_core.generation.response import NOTHING
from slime_core.rollout.engines.ending import OK, Ending
from slime_core.rollout.engines.generation import read_generation
from slime_core.rollout.engines.targets import Targets, session_headers
from slime_core.rollout.nucleus import Cut

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
BODY_SHOWN = 400
"""Characters of a refusal that an error quotes."""

REFUSED = range(400, 500)
OVERLOADED = {status: f"engine_status_{status}" for status in (408, 429)}
"""The two refusals that say nothing about the request, too slow and too many -> the cause of the failure. They cost its
samples, where any other refusal ends the run: it would meet every such request."""

MALFORMED = "engine_malformed"
"""Cause of a failure: what came is no answer of an engine."""

TIMEOUT = "engine_timeout"
"""Cause of a failure: nothing came within the limit."""

ROUTES = "return_routed_experts"
"""The field of a request that asks for :attr:`Generation.routed_experts`."""

PROMPTS_PER_REQUEST = 32
"""500 greedy answers of 4 tokens on two cores: 1.0 s one by one, 0.55 s in batches; larger ones gain nothing."""


class GenerateClient:
    """Sends prompts to ``url``; use it from one event loop, and close it there.

    Arguments:
        url: of the router (or of one engine).
        max_in_flight: requests under way at once; more wait here.
        timeout_s: until a request must have succeeded, retries and waiting for an engine included, waiting here
            excluded.
        vocab_size: ids must be below it; None: unchecked. An id beyond the embedding kills the server, so check.
        routes: layers of the model, and experts a token, of a mixture whose engines are asked for the routes of each
            token; None: they are not.
        engines: URLs of engines to send to directly, the least busy first; empty: ``url`` chooses.
    """

    def __init__(
        self,
        url: str,
        *,
        max_in_flight: int = 256,
        timeout_s: float = 300.0,
        vocab_size: int | None = None,
        routes: tuple[int, int] | None = None,
        engines: Sequence[str] = (),
    ) -> None:
        self.url = url.rstrip("/")
        self._targets = Targets([one.rstrip("/") for one in engines] or [self.url])
        self._timeout_s = timeout_s
        self._vocab_size = vocab_size
        self._routes = routes
        self._room = asyncio.Semaphore(max_in_flight)
        self._ending = Ending(self.url, self._open)
        self._session: aiohttp.ClientSession | None = None

    async def generate(
        self,
        input_ids: Sequence[int],
        *,
        sampling: SamplingParams,
        n: int = 1,
        timeout_s: float | None = None,
        extra: Mapping[str, Any] | None = None,
        session: str | None = None,
    ) -> list[Generation]:
        """``n`` responses to one prompt.

        Arguments:
            input_ids: the prompt.
            sampling: how tokens are drawn.
            n: number of responses.
            timeout_s: instead of the client's own limit.
            extra: further fields of SGLang's request (``image_data``, ``lora_path``).
            session: of a conversation, whose turns stay with one engine where ``sglang_router_policy`` says so.

        Raises:
            RequestRefused: an id is out of range, or the engine refused the request.
            RequestFailed: no engine answered in time.
        """
        fields = {**({ROUTES: True} if self._routes else {}), **(extra or {})}
        answers = await self._request([list(input_ids)], sampling, n, timeout_s, fields, session)
        return answers[0]

    async def generate_many(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        sampling: SamplingParams,
        n: int = 1,
        timeout_s: float | None = None,
        prompts_per_request: int = PROMPTS_PER_REQUEST,
    ) -> list[list[Generation]]:
        """``n`` responses to each prompt, in order; several prompts share a request, which saves half the time of short
        answers.

        A request comes back with its last response, and fails as a whole: for answers of a similar, short length, as in
        evaluation.

        Raises:
            EngineError: see :meth:`generate`.
        """
        parts = [
            [list(ids) for ids in prompts[start : start + prompts_per_request]]
            for start in range(0, len(prompts), prompts_per_request)
        ]
        answers = await asyncio.gather(*(self._request(part, sampling, n, timeout_s, {}) for part in parts))
        return [group for part in answers for group in part]

    def ended(self) -> AbstractAsyncContextManager[None]:
        """While the block runs, requests end as aborted: those under way with the tokens that they have, those that
        wait or come in with none."""
        return self._ending.ended()

    async def close(self) -> None:
        """Close all connections; requests under way are aborted by the engines."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> GenerateClient:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()

    async def _request(
        self,
        prompts: list[list[int]],
        sampling: SamplingParams,
        n: int,
        timeout_s: float | None,
        extra: Mapping[str, Any],
        session: str | None = None,
    ) -> list[list[Generation]]:
        self._check_ids(prompts)
        # A single prompt goes flat: the router's cache-aware policy reads it, and errors are reported plainly.
        ids: Any = prompts if len(prompts) > 1 else prompts[0]
        fields = sampling.fields(n=n)
        cut = Cut.of(fields, most=sampling.max_kept, vocab_size=self._vocab_size)
        asked = {} if cut is None else {"top_logprobs_num": cut.top_k}
        if cut is not None:
            fields["top_k"] = cut.top_k
        body = {"input_ids": ids, "sampling_params": fields, "return_logprob": True, **asked, **extra}
        async with self._room:
            limit_s = self._timeout_s if timeout_s is None else timeout_s
            answer = await self._post(json.dumps(body).encode(), limit_s, session)
        if answer is None:
            return [[NOTHING] * n for _ in prompts]
        rows = answer if isinstance(answer, list) else [answer]
        if len(rows) != n * len(prompts):
            raise EngineError(f"Asked for {n} responses to each of {len(prompts)} prompts; {self.url} sent {len(rows)}")
        routes = self._routes if extra.get(ROUTES) else None
        generations = [read_generation(row, routes, cut) for row in rows]
        return [generations[start : start + n] for start in range(0, len(rows), n)]

    def _check_ids(self, prompts: Sequence[Sequence[int]]) -> None:
        for ids in prompts:
            if not ids:
                raise RequestRefused("Asked to continue a prompt of no tokens; a prompt needs at least one")
            if self._vocab_size is not None and not 0 <= min(ids) <= max(ids) < self._vocab_size:
                wrong = [one for one in ids if not 0 <= one < self._vocab_size][:5]
                raise RequestRefused(
                    f"Asked to continue a prompt with the ids {wrong}; the model knows 0 to {self._vocab_size - 1}. "
                    "Encode prompts with the tokenizer of the model's folder."
                )

    async def _post(self, body: bytes, timeout_s: float, session: str | None) -> Any:
        """The answer; None: requests end, so it was not sent, or not again."""
        deadline_s = time.monotonic() + timeout_s
        attempts, failure = 0, _Failure("", "")
        failed: list[str] = []
        while not self._ending.is_on:
            attempts += 1
            with self._targets.one(session=session, failed=failed) as url:
                found = await self._attempt(url, body, deadline_s, session)
            if not isinstance(found, _Failure):
                return found
            failed.append(url)
            # A last try that the limit itself cut off says less than those before it.
            failure = failure if attempts > 1 and found.cause == TIMEOUT else found
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempts - 1)) * random.uniform(0.5, 1.0)
            if time.monotonic() + pause_s >= deadline_s:
                raise RequestFailed(
                    f"{url}/generate gave no answer within {timeout_s:g} s and {attempts} attempts; "
                    f"the last one failed with {failure.reason}. Are the engines alive?",
                    failure.cause,
                )
            await asyncio.sleep(pause_s)
        return None

    async def _attempt(self, url: str, body: bytes, deadline_s: float, session: str | None) -> Any:
        limit = aiohttp.ClientTimeout(total=max(0.001, deadline_s - time.monotonic()))
        try:
            headers = session_headers(session)
            async with self._open().post(f"{url}/generate", data=body, timeout=limit, headers=headers) as response:
                content = await response.read()
        except TimeoutError as error:
            return _Failure(repr(error), TIMEOUT)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            return _Failure(repr(error), "engine_connection")
        except aiohttp.ClientResponseError as error:
            return _Failure(f"an answer that is no HTTP: {error!r}", MALFORMED)
        if response.status == OK:
            return _read(content)
        text = content.decode(errors="replace")[:BODY_SHOWN]
        if response.status in REFUSED:
            raise _refusal(response.status, f"{url}/generate refused the request with status {response.status}: {text}")
        return _Failure(f"status {response.status}: {text}", f"engine_status_{response.status}")

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),  # the semaphore is the bound
                headers={"Content-Type": "application/json"},
            )
        return self._session


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why an attempt failed that may be repeated, and of which kind that is."""

    reason: str
    cause: str


def _refusal(status: int, said: str) -> EngineError:
    if status in OVERLOADED:
        asks_less = "It is not sent again. Ask for less at once with --sglang-server-concurrency."
        return RequestFailed(f"{said}\n{asks_less}", OVERLOADED[status])
    return RequestRefused(
        f"{said}\nLeave out long prompts with --rollout-max-prompt-len, or lower --rollout-max-response-len."
    )


def _read(content: bytes) -> Any:
    """One response or several, or a failure."""
    try:
        answer = json.loads(content)
    except ValueError as error:
        return _Failure(f"an answer that is no JSON: {error}", MALFORMED)
    if not all(map(_is_response, answer if isinstance(answer, list) else [answer])):
        text = content.decode(errors="replace")[:BODY_SHOWN]
        return _Failure(f"the answer {text}, which is no response of SGLang's", MALFORMED)
    return answer


def _is_response(row: Any) -> bool:
    meta = row.get("meta_info") if isinstance(row, dict) else None
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    return isinstance(reason, dict) and "type" in reason and isinstance(row.get("output_ids"), list)
