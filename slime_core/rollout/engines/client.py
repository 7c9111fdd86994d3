"""Sends token ids to the engines; :mod:`.responses` reads their answers.

    GenerateClient    one connection pool, a bound on the responses in flight, retries with growing pauses
    InFlightLimit     that bound, in constant time for each request
    ShortRequests     one request for many prompts with short responses
    Targets           chooses the URL of each attempt
    RequestAborter    aborts the requests in flight; they return the tokens that they have
    EngineProgress    whether the engines of a request still compute, so that a long response may take its time

An engine that dies or restarts costs time, not a sample. A refusal (4xx) is never sent again. Everything runs in one
event loop.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from http import HTTPStatus
from typing import Any

import aiohttp

from slime_core.config.secrets import engine_headers, key_advice, send_key_to
from slime_core.errors import EngineError, RequestFailed, RequestRefused
from slime_core.generation import Generation, SamplingParams
from slime_core.generation.sampling import NOTHING
from slime_core.rollout.engines.responses import (
    BODY_SHOWN,
    LOADS,
    NO_COLUMNS,
    Truncation,
    read_answer,
    read_generation,
    read_load,
    request_fields,
)
from slime_core.rollout.engines.server import PROBE_INTERVAL_S, READY
from slime_core.types import EngineColumn

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0

REFUSED = range(400, 500)
OVERLOADED = {status: f"engine_status_{status}" for status in (408, 429)}
"""Refusals (timeout, too many requests) that do not depend on the request -> the cause of the failure. They fail the
request's samples; any other refusal ends the run, because every such request would be refused."""

MALFORMED = "engine_malformed"
"""Cause of a failure: the response is no answer of an engine."""

TIMEOUT = "engine_timeout"
"""Cause of a failure: no response within the limit."""

LOOKS = 8
"""Minimum number of looks at the engines' progress within the limit of a request: some may fail."""

COPIED_TOKENS = 16
"""Tokens up to which a prompt is sent once for each of its responses, in one request. For ``n`` responses SGLang
computes the prompt in a pass of its own first, so that they share it (sglang 0.5.23,
srt/managers/tokenizer_manager.py:2110); for the demo's prompts on a CPU that pass takes longer than what it
saves. At which length it begins to save has not been measured."""

SHORT_RESPONSE = 16
"""Most tokens of responses that are requested together with those of other prompts (:class:`ShortRequests`). They end
at nearly the same time; a longer response would wait for the longest of its request."""

ROUTES = "return_routed_experts"
"""The field of a request for :attr:`Generation.routed_experts`."""


class GenerateClient:
    """Sends prompts to ``url``; use and close it in one event loop.

    Arguments:
        url: of the router (or of one engine).
        max_in_flight: responses that are generated at once (:class:`InFlightLimit`); further requests wait in the
            client.
        timeout_s: limit of a request in seconds, with its retries, without its wait in the client. It counts from the
            last progress of the engines that it was sent to (:class:`EngineProgress`): a long response may take longer.
        vocab_size: ids must be below it. None: not checked. An id beyond the embedding kills the server.
        routes: layers of the model and experts per token, to request the routed experts of each token. None: not
            requested.
        engines: URLs of engines to send to directly, the least busy first; empty: send to ``url``.
        num_engines: behind ``url``; where ``engines`` are named, their number.
        restart_s: seconds that a request waits in addition, from its first failed attempt on, because the run starts an
            engine again.
        masks_up_to: largest top_k for which ``engines`` report the truncated-sampling mask; 0: none do.
        columns: data to request and read for each token, by name.
        first_answer_s: seconds without progress in which an engine may compute its first response, from the first
            request on, because it compiles kernels; only then ``timeout_s`` counts. 0: it compiles none.
    """

    def __init__(
        self,
        url: str,
        *,
        max_in_flight: int = 512,
        timeout_s: float = 300.0,
        vocab_size: int | None = None,
        routes: tuple[int, int] | None = None,
        engines: Sequence[str] = (),
        num_engines: int = 1,
        restart_s: float = 0.0,
        first_answer_s: float = 0.0,
        masks_up_to: int = 0,
        columns: Mapping[str, EngineColumn] = NO_COLUMNS,
    ) -> None:
        self._columns = columns
        self.url = url.rstrip("/")
        self._masks_up_to = masks_up_to if engines else 0  # a router would drop the field
        self._restart_s = restart_s
        self._targets = Targets([engine.rstrip("/") for engine in engines] or [self.url])
        self._first_answers = FirstAnswers(first_answer_s)
        self._timeout_s = timeout_s
        self._vocab_size = vocab_size
        self._routes = routes
        self._short = ShortRequests(self._post_joined, max(num_engines, len(engines)))
        self._aborter = RequestAborter(self.url, self._open)
        self._in_flight = InFlightLimit(max_in_flight, self._num_running)
        self._progress = EngineProgress(self._aborter.get, self._engines_behind)
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
        """As :meth:`slime_core.generation.Client.generate` says; without ``timeout_s``, within the client's limit."""
        ids = list(input_ids)
        self._check_ids(ids)
        extra = {**({ROUTES: True} if self._routes else {}), **(extra or {})}
        truncation = Truncation.of(sampling.fields(n=n), most=sampling.max_kept, vocab_size=self._vocab_size)
        # SGLang refuses to return a mask that a custom processor may have changed.
        may_mask = "custom_logit_processor" not in extra
        has_mask = truncation is not None and truncation.top_k <= self._masks_up_to and may_mask
        # With n > 1 it first caches the prompt, samples nothing, and fails without a mask (sglang 0.5.23,
        # srt/managers/tokenizer_manager.py:2146). Each copy is prefilled, which costs little if the prompt is no longer
        # than its responses.
        most_copied = max(COPIED_TOKENS, sampling.max_new_tokens if has_mask else 0)
        copied = len(ids) <= most_copied and not extra  # fields of extra may belong to one prompt, such as its images
        fields = sampling.fields(n=1 if copied else n)
        of_truncation: dict[str, Any] = {}
        if truncation is not None:
            truncation = replace(truncation, is_reported=has_mask and (n == 1 or copied))
            fields["top_k"] = truncation.top_k
            of_truncation = truncation.request_fields
        requested = request_fields(self._columns, of_truncation)
        more = {"sampling_params": fields, "return_logprob": True, **requested, **extra}
        prompts = [ids] * n if copied else [ids]
        async with self._in_flight.hold(n):
            if copied and session is None and timeout_s is None and sampling.max_new_tokens <= SHORT_RESPONSE:
                rows = await self._short.request(prompts, more)
            else:
                limit = _Limit(self._timeout_s if timeout_s is None else timeout_s, follows_progress=timeout_s is None)
                rows = await self._post_rows(prompts, more, n, limit, session)
        routes = self._routes if extra.get(ROUTES) else None
        if rows is None:
            return [NOTHING] * n
        return [read_generation(row, routes, truncation, self._columns) for row in rows]

    async def engine_url(self) -> str:
        """As :meth:`slime_core.generation.Client.engine_url` says."""
        url = (await self._aborter.engines() or [self.url])[0]
        if engine_headers(self.url):  # a router of the run lists engines that require the same key
            send_key_to(url)
        return url

    @property
    def num_in_flight(self) -> int:
        """Number of responses of requests that an engine has not answered, or that wait in the client."""
        return self._in_flight.num_inside

    def aborting(self) -> AbstractAsyncContextManager[None]:
        """Context manager: requests end as aborted while it is active. Those in flight return the tokens that they
        have, waiting and new ones return none."""
        return self._aborter.aborting()

    async def close(self) -> None:
        """Close all connections; the engines abort the requests in flight."""
        await self._in_flight.close()
        await self._short.close()
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> GenerateClient:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()

    async def _post_joined(self, prompts: list[list[int]], more: Mapping[str, Any]) -> list[Any] | None:
        return await self._post_rows(prompts, more, len(prompts), _Limit(self._timeout_s, follows_progress=True), None)

    async def _post_rows(
        self, prompts: list[list[int]], more: Mapping[str, Any], count: int, limit: _Limit, session: str | None
    ) -> list[Any] | None:
        """Return the ``count`` responses to one request, or None if requests are being aborted."""
        body = {"input_ids": prompts if len(prompts) > 1 else prompts[0], **more}
        rows = await self._post(json.dumps(body).encode(), limit, session)
        if rows is not None and len(rows) != count:
            raise EngineError(f"{self.url} sent {len(rows)} responses; {count} were requested")
        return rows

    def _check_ids(self, ids: Sequence[int]) -> None:
        if not ids:
            raise RequestRefused("A prompt has no tokens; it needs at least one")
        if self._vocab_size is not None and not 0 <= min(ids) <= max(ids) < self._vocab_size:
            unknown = [token for token in ids if not 0 <= token < self._vocab_size][:5]
            raise RequestRefused(
                f"A prompt has the ids {unknown}; the model has 0 to {self._vocab_size - 1}. "
                "Encode prompts with the tokenizer of the model's folder."
            )

    async def _post(self, body: bytes, limit: _Limit, session: str | None) -> list[Any] | None:
        """Return the responses, or None if requests are being aborted, so it was not sent, or not retried."""
        failure, failed = _Failure("", ""), list[str]()
        while not self._aborter.is_on:
            with self._targets.one(session=session, failed=failed) as url:
                outcome = await self._attempt(url, body, limit, session)
            if not isinstance(outcome, _Failure):
                return outcome
            failed.append(url)
            attempts = len(failed)
            if attempts == 1 and self._restart_s and limit.follows_progress:
                limit.extend(time.monotonic() + self._restart_s)
            # A last attempt that ran into the limit says less than the failure before it.
            failure = failure if attempts > 1 and outcome.cause == TIMEOUT else outcome
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempts - 1)) * random.uniform(0.5, 1.0)
            if pause_s >= limit.left_s():
                raise RequestFailed(
                    f"{url}/generate gave no answer within {limit.seconds:g} s and {attempts} attempts; "
                    f"the last one failed with {failure.reason}. Are the engines alive?",
                    failure.cause,
                )
            await asyncio.sleep(pause_s)
        return None

    async def _attempt(self, url: str, body: bytes, limit: _Limit, session: str | None) -> list[Any] | _Failure:
        sending = asyncio.ensure_future(self._send(url, body, session))
        try:
            self._first_answers.sent(url)
            await self._wait_answer(sending, url, limit)
            if not sending.done():
                return _Failure(f"a TimeoutError{limit.unmoved}", TIMEOUT)
            status, content = sending.result()
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            return _Failure(repr(error), "engine_connection")
        except aiohttp.ClientResponseError as error:
            return _Failure(f"a response that is not valid HTTP: {error!r}", MALFORMED)
        finally:
            sending.cancel()
        if status == HTTPStatus.OK:
            self._first_answers.answered(url)
            try:
                return read_answer(content)
            except ValueError as error:
                return _Failure(str(error), MALFORMED)
        text = content.decode(errors="replace")[:BODY_SHOWN]
        if status in REFUSED:
            raise _refusal(status, url, text)
        return _Failure(f"status {status}: {text}", f"engine_status_{status}")

    async def _send(self, url: str, body: bytes, session: str | None) -> tuple[int, bytes]:
        headers, unlimited = {} if session is None else {ROUTING_KEY: session}, aiohttp.ClientTimeout()
        async with self._open().post(f"{url}/generate", data=body, timeout=unlimited, headers=headers) as response:
            return response.status, await response.read()

    async def _wait_answer(self, sending: asyncio.Future[tuple[int, bytes]], url: str, limit: _Limit) -> None:
        """Return when there is an answer, or when the limit has passed since the engines' last progress."""
        while not sending.done() and limit.left_s() > 0:
            await asyncio.wait([sending], timeout=min(limit.left_s(), limit.interval_s))
            if limit.follows_progress and not sending.done():
                moved_s = await self._progress.last_s(url, interval_s=limit.interval_s)
                limit.extend(max(moved_s, self._first_answers.waited_until_s(url)))

    async def _num_running(self) -> int | None:
        """Return the number of sequences of the engines, or None if an engine does not answer."""
        answers = await asyncio.gather(*(self._aborter.get(f"{url}{LOADS}") for url in await self._aborter.engines()))
        loads = [load for _, answer in answers if (load := read_load(answer)) is not None]
        return sum(load.sequences for load in loads) if answers and len(loads) == len(answers) else None

    async def _engines_behind(self, url: str) -> list[str]:
        return await self._aborter.engines() if url == self.url else [url]

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),  # InFlightLimit is the bound
                headers={"Content-Type": "application/json", **engine_headers(self.url)},
            )
        return self._session


LOOK_S = 1.0
"""Seconds between two looks at the sequences of the engines, while requests wait for a place."""


@dataclass(slots=True, eq=False)
class _Place:
    """The place of a request: its ``sequences``, of which a look may have counted all except one as complete."""

    sequences: int
    admitted: asyncio.Future[None]


class InFlightLimit:
    """Bounds the sequences in flight; requests wait, and enter in the order of their arrival.

    A request is answered when its longest response is complete. While requests wait, the limit reads the number of
    unfinished sequences from the engines, so that completed responses make room before that. Every unanswered request
    counts as one sequence at least; a request that was sent since the look before the last, which an engine may not
    count yet, counts with all its sequences.

    Everything except a look takes constant time. ``asyncio.Semaphore`` takes quadratic time if thousands of answers
    arrive at once.

    Arguments:
        places: largest number of sequences; a request with more of them enters alone.
        running: returns the number of sequences of the engines, from any sender. None: unknown.
    """

    def __init__(self, places: int, running: Callable[[], Awaitable[int | None]] | None = None) -> None:
        self.num_inside = 0
        """Sequences of the requests that are in flight or wait."""
        self._places = places
        self._running = running
        self._waiting: deque[_Place] = deque()
        self._sent: dict[_Place, None] = {}
        self._seen: set[_Place] = set()
        self._num_sent = 0
        self._num_complete = 0
        self._looking: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def hold(self, sequences: int) -> AsyncIterator[None]:
        """Wait for places for the ``sequences`` of a request; hold them until its block ends."""
        place = _Place(min(sequences, self._places), asyncio.get_running_loop().create_future())
        self._waiting.append(place)
        self.num_inside += sequences
        try:
            self._admit()
            await self._wait(place)
            yield
        finally:
            self.num_inside -= sequences
            if place in self._sent:
                self._leave(place)

    async def close(self) -> None:
        """Stop looking at the engines."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _wait(self, place: _Place) -> None:
        if place.admitted.done():
            return
        if self._running is not None and (self._looking is None or self._looking.done()):
            self._looking = asyncio.create_task(self._look_while_waiting(self._running))
        await place.admitted

    def _admit(self) -> None:
        while self._waiting:
            place = self._waiting[0]
            is_cancelled = place.admitted.cancelled()
            if not is_cancelled and self._num_sent - self._num_complete + place.sequences > self._places:
                return
            self._waiting.popleft()
            if not is_cancelled:
                self._sent[place] = None
                self._num_sent += place.sequences
                place.admitted.set_result(None)

    def _leave(self, place: _Place) -> None:
        del self._sent[place]
        self._num_sent -= place.sequences
        # At most these of the complete sequences belonged to it; the next look counts again.
        self._num_complete = max(0, self._num_complete - (place.sequences - 1))
        self._admit()

    async def _look_while_waiting(self, running: Callable[[], Awaitable[int | None]]) -> None:
        while self._waiting:
            await asyncio.sleep(LOOK_S)
            counted, self._seen = self._seen, set(self._sent)
            num_running = await running()
            if num_running is not None:
                least = sum(1 if place in counted else place.sequences for place in self._sent)
                self._num_complete = max(0, self._num_sent - max(num_running, least))
            self._admit()


class ShortRequests:
    """Joins prompts that are asked for in one pass of the event loop with the same fields, into one request an engine.

    A request costs the server's HTTP process about a millisecond and the client a third of one, and its responses are
    computed in passes of their own until the next is read. For responses of few tokens this is most of the time.

    Arguments:
        post: sends prompts with the fields, and returns one row for each prompt or None.
        num_engines: requests to divide the prompts among.
    """

    def __init__(
        self,
        post: Callable[[list[list[int]], Mapping[str, Any]], Coroutine[Any, Any, list[Any] | None]],
        num_engines: int,
    ) -> None:
        self._post = post
        self._num_engines = num_engines
        self._open: dict[str, deque[tuple[list[list[int]], asyncio.Task[list[Any] | None]]]] = {}
        self._in_flight: set[asyncio.Task[list[Any] | None]] = set()

    async def request(self, prompts: Sequence[list[int]], fields: Mapping[str, Any]) -> list[Any] | None:
        """What ``post`` returns for ``prompts``; raises what it raises."""
        joined, answer = self._join(json.dumps(fields), fields)
        start = len(joined)
        joined += prompts
        rows = await asyncio.shield(answer)  # the others wait for it when this caller is cancelled
        return None if rows is None else rows[start : start + len(prompts)]

    def _join(self, key: str, fields: Mapping[str, Any]) -> tuple[list[list[int]], asyncio.Task[list[Any] | None]]:
        """The prompts of a request that is not sent yet, and its answer."""
        if key not in self._open:
            self._open[key] = deque()
            # Runs after all tasks that are ready now, and before those that they start: then the prompts are complete.
            asyncio.get_running_loop().call_soon(self._open.pop, key)
        requests = self._open[key]
        if len(requests) < self._num_engines:
            joined: list[list[int]] = []
            answer = asyncio.create_task(self._post(joined, fields))
            self._in_flight.add(answer)
            answer.add_done_callback(self._in_flight.discard)
            requests.append((joined, answer))
        else:
            requests.rotate(-1)
        return requests[-1]

    async def close(self) -> None:
        """End the requests in flight, which outlive callers that were cancelled."""
        for answer in self._in_flight:
            answer.cancel()
        await asyncio.gather(*self._in_flight, return_exceptions=True)


class FirstAnswers:
    """The time that engines have for their first response.

    Arguments:
        seconds: from the first request on.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ends_s: dict[str, float] = {}

    def sent(self, url: str) -> None:
        """A request is sent to ``url``, an engine or a router."""
        self._ends_s.setdefault(url, time.monotonic() + self._seconds)

    def answered(self, url: str) -> None:
        """``url`` has answered; from now on its limit is the ordinary one."""
        self._ends_s[url] = min(self._ends_s[url], time.monotonic())

    def waited_until_s(self, url: str) -> float:
        """Return until when (``time.monotonic``) requests to ``url`` wait although it shows no progress: now, or in the
        past."""
        return min(self._ends_s[url], time.monotonic())


class _Limit:
    """The time that a request has.

    Arguments:
        seconds: from now on; with ``follows_progress`` from the engines' last progress on.
    """

    def __init__(self, seconds: float, *, follows_progress: bool) -> None:
        self.seconds = seconds
        self.follows_progress = follows_progress
        self.interval_s = min(PROBE_INTERVAL_S, seconds / LOOKS)
        self.unmoved = ", while the counters of its engines (/v1/loads) stood still" if follows_progress else ""
        self._deadline_s = time.monotonic() + seconds

    def left_s(self) -> float:
        """Return the remaining seconds."""
        return self._deadline_s - time.monotonic()

    def extend(self, moved_s: float) -> None:
        """The engines computed at ``moved_s``, which is ``time.monotonic``'s."""
        self._deadline_s = max(self._deadline_s, moved_s + self.seconds)


@dataclass(frozen=True, slots=True)
class _Failure:
    """The reason why an attempt failed; it may be retried."""

    reason: str
    cause: str


def _refusal(status: int, url: str, text: str) -> EngineError:
    reported = f"{url}/generate refused the request with status {status}: {text}"
    if status in OVERLOADED:
        asks_less = "It is not sent again. Lower --sglang-server-concurrency."
        return RequestFailed(f"{reported}\n{asks_less}", OVERLOADED[status])
    shorter = "Leave out long prompts with --rollout-max-prompt-len, or lower --rollout-max-response-len."
    return RequestRefused(f"{reported}\n{' '.join(key_advice(status, url)) or shorter}")


ROUTING_KEY = "x-smg-routing-key"
"""The header by which sglang-router 0.3.2 keeps a session with one engine (policies ``consistent_hashing``,
``manual``)."""


class Targets:
    """Chooses among ``urls``: the one of the session, or the one with the fewest requests in flight.

    A session belongs to the URL with the highest hash of both (rendezvous hashing): every process chooses the same URL,
    and adding or removing an engine moves few sessions. After a failure the other URLs are tried first.

    Engines are addressed directly if the router would drop a field of the request: sglang-router 0.3.2 forwards only
    the fields that it knows, and ``return_routed_experts`` is not among them.

    Arguments:
        urls: of engines; or of a router alone.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._in_flight = Counter(dict.fromkeys(urls, 0))

    @contextmanager
    def one(self, *, session: str | None, failed: Sequence[str] = ()) -> Iterator[str]:
        """Choose the URL for one attempt, which is in flight inside the block.

        Arguments:
            session: id of the conversation. None: the request belongs to none.
            failed: URLs at which this request has failed, once for each failure.
        """
        chosen = self._choose(session, failed)
        self._in_flight[chosen] += 1
        try:
            yield chosen
        finally:
            self._in_flight[chosen] -= 1

    def _choose(self, session: str | None, failed: Sequence[str]) -> str:
        failures = Counter(failed)
        return min(self._in_flight, key=lambda url: (failures[url], self._rank(url, session)))

    def _rank(self, url: str, session: str | None) -> int:
        if session is None:
            return self._in_flight[url]
        return -int.from_bytes(blake2b(f"{session} {url}".encode(), digest_size=8).digest(), "big")


OUT_OF_REACH = (aiohttp.ClientError, TimeoutError, OSError)
"""Errors of a call that did not reach its engine."""

ABORT_INTERVAL_S = 0.25
"""Seconds between two rounds of aborts."""

ABORT_LIMIT_S = 5.0
"""Limit of one abort call."""


class RequestAborter:
    """Ends the requests of a client before their time; each returns the tokens that it has.

    Repeats the abort until its context exits, because a request may still be in transit to an engine. It reaches
    requests of other senders too: a generate function may call the engines by itself. Errors of the abort calls are
    ignored: the requests of an engine that does not answer end at their time limit.

    Arguments:
        url: of the router (or of one engine).
        session: returns the client's connections.

    Attributes:
        is_on: requests are being aborted, so none must be sent.
    """

    def __init__(self, url: str, session: Callable[[], aiohttp.ClientSession]) -> None:
        self._url = url
        self._session = session
        self.is_on = False

    @asynccontextmanager
    async def aborting(self) -> AsyncIterator[None]:
        """Abort requests while the context is active; raises nothing."""
        self.is_on = True
        aborts = asyncio.create_task(self._repeat_abort())
        try:
            yield
        finally:
            self.is_on = False
            aborts.cancel()
            await asyncio.gather(aborts, return_exceptions=True)

    async def _repeat_abort(self) -> None:
        while True:
            await asyncio.gather(*(self._call("POST", f"{url}/abort_request") for url in await self.engines()))
            await asyncio.sleep(ABORT_INTERVAL_S)

    async def engines(self) -> list[str]:
        """Return the URLs of the router's engines; for an engine, its URL."""
        match await self.get(f"{self._url}/workers"):
            case (200, {"workers": [*entries]}):
                return [entry["url"] for entry in entries if isinstance(entry, dict) and "url" in entry]
        return [self._url]

    async def get(self, url: str) -> tuple[int, Any]:
        """Send a GET; return status and parsed answer. Status 0: no answer."""
        return await self._call("GET", url)

    async def _call(self, method: str, url: str) -> tuple[int, Any]:
        limit, body = aiohttp.ClientTimeout(total=ABORT_LIMIT_S), {"abort_all": True} if method == "POST" else None
        with suppress(*OUT_OF_REACH, ValueError):
            async with self._session().request(method, url, json=body, timeout=limit) as response:
                return response.status, await response.json(
                    content_type=None
                ) if response.status == HTTPStatus.OK else None
        return 0, None


class EngineProgress:
    """Remembers when the counters of each engine's load (:class:`~.responses.Load`) changed last.

    A request is answered once, when all its responses are complete: nothing of it arrives meanwhile. The counters are
    of the whole engine (sglang 0.5.23, srt/managers/load_snapshot.py) and stand still when its scheduler does. Streams
    would show the tokens of one response, but each part repeats the log-probabilities of all parts before it.

    Arguments:
        get: sends a GET to a URL, and returns status and parsed answer; status 0: there was none.
        engines: from the URL that a request was sent to (an engine, or a router) to the engines behind it.
    """

    def __init__(
        self,
        get: Callable[[str], Awaitable[tuple[int, Any]]],
        engines: Callable[[str], Awaitable[list[str]]],
    ) -> None:
        self._get = get
        self._engines = engines
        self._counters: dict[str, tuple[tuple[Any, ...], ...]] = {}
        self._moved_s: dict[str, float] = {}
        self._looked_s: dict[str, float] = {}

    async def last_s(self, url: str, *, interval_s: float) -> float:
        """Return when (``time.monotonic``) an engine behind ``url`` last computed or was paused; 0: never.

        Queries the engines, unless another request did within ``interval_s``.
        """
        now_s = time.monotonic()
        if now_s - self._looked_s.get(url, -interval_s) >= interval_s:
            self._looked_s[url] = now_s
            if any(await asyncio.gather(*map(self._has_moved, await self._engines(url)))):
                self._moved_s[url] = time.monotonic()
        return self._moved_s.get(url, 0.0)

    async def _has_moved(self, engine: str) -> bool:
        status, answer = await self._get(f"{engine}{LOADS}")
        load = read_load(answer) if status == HTTPStatus.OK else None
        if load is None:
            return False
        before = self._counters.get(engine)
        if load.counters == before:
            # A paused engine holds its requests intentionally; the calls that pause it have limits.
            return (await self._get(f"{engine}{READY}"))[0] == HTTPStatus.SERVICE_UNAVAILABLE
        self._counters[engine] = load.counters
        return before is not None
