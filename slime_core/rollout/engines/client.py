"""Sends token ids to the engines, and parses their answers.

    GenerateClient    one connection pool, a bound on the requests in flight, retries with growing pauses
    InFlightLimit     that bound, in constant time for each request, however many wait
    ShortRequests     one request for many prompts with short responses
    read_generation   one response with its log-probabilities, weight versions, routes and counters
    Targets           chooses the URL of each attempt
    RequestAborter    aborts the requests in flight; they return the tokens that they have

An engine that dies or restarts costs time, not a sample. A refusal (4xx) is never sent again. Everything runs in one
event loop.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from array import array
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, cast

import aiohttp

from slime_core.config.secrets import engine_headers, key_advice, send_key_to
from slime_core.errors import EngineError, RequestFailed, RequestRefused
from slime_core.generation import FinishReason, Generation, SamplingParams
from slime_core.generation.sampling import NOTHING
from slime_core.rollout.engines.progress import EngineProgress
from slime_core.rollout.engines.routes import put_back, shaped, take_routes
from slime_core.rollout.engines.server import PROBE_INTERVAL_S
from slime_core.rollout.engines.truncated_sampling import Truncation, truncate
from slime_core.types import Sample, SpecInfo
from slime_core.untrusted import parse_long_json

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
BODY_SHOWN = 400
"""Characters of a refusal that an error quotes."""

REFUSED = range(400, 500)
OVERLOADED = {status: f"engine_status_{status}" for status in (408, 429)}
"""Refusals (timeout, too many requests) that do not depend on the request -> the cause of the failure. They fail the
request's samples; any other refusal ends the run, because every such request would be refused."""

MALFORMED = "engine_malformed"
"""Cause of a failure: the response is no answer of an engine."""

TIMEOUT = "engine_timeout"
"""Cause of a failure: no response within the limit."""

LOOKS = 8
"""Fewest looks at the engines' progress within the limit of a request: some of them may fail."""

COPIED_TOKENS = 16
"""Tokens up to which a prompt is sent once for each of its responses, in one request. For ``n`` responses SGLang
computes the prompt in a pass of its own first, so that they share it (sglang 0.5.23,
srt/managers/tokenizer_manager.py:2110); for the demo's prompts on a CPU that pass takes longer than what it
saves. At which length it begins to save has not been measured."""

SHORT_RESPONSE = 16
"""Most tokens of responses that are requested together with those of other prompts (:class:`ShortRequests`). They end
at nearly the same time; a longer response would wait for the longest of its request."""

ROUTES = "return_routed_experts"
"""The field of a request that asks for :attr:`Generation.routed_experts`."""


class GenerateClient:
    """Sends prompts to ``url``; use and close it in one event loop.

    Arguments:
        url: of the router (or of one engine).
        max_in_flight: requests in flight at once; more wait in the client.
        timeout_s: limit of a request in seconds, with its retries, without its wait in the client. It counts from the
            last progress of the engines that it was sent to (:mod:`.progress`): a long response may take longer.
        vocab_size: ids must be below it; None: not checked. An id beyond the embedding kills the server.
        routes: layers of the model and experts per token, to request the routed experts of each token; None: not
            requested.
        engines: URLs of engines to send to directly, the least busy first; empty: send to ``url``.
        num_engines: behind ``url``; where ``engines`` are named, their number.
        restart_s: seconds that a request waits in addition, from its first failed attempt on, because the run starts an
            engine again.
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
        num_engines: int = 1,
        restart_s: float = 0.0,
    ) -> None:
        self.url = url.rstrip("/")
        self._restart_s = restart_s
        self._targets = Targets([one.rstrip("/") for one in engines] or [self.url])
        self._timeout_s = timeout_s
        self._vocab_size = vocab_size
        self._routes = routes
        self._in_flight = InFlightLimit(max_in_flight)
        self._short = ShortRequests(self._post_joined, max(num_engines, len(engines)))
        self._aborter = RequestAborter(self.url, self._open)
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
        fields = {**({ROUTES: True} if self._routes else {}), **(extra or {})}
        return await self._request(list(input_ids), sampling, n, timeout_s, fields, session)

    async def engine_url(self) -> str:
        """As :meth:`slime_core.generation.Client.engine_url` says."""
        url = (await self._aborter.engines() or [self.url])[0]
        if engine_headers(self.url):  # a router of the run lists engines that require the same key
            send_key_to(url)
        return url

    def aborting(self) -> AbstractAsyncContextManager[None]:
        """Context manager: requests end as aborted while it is active. Those in flight return the tokens that they
        have, waiting and new ones return none."""
        return self._aborter.aborting()

    async def close(self) -> None:
        """Close all connections; the engines abort the requests in flight."""
        self._progress.close()
        await self._short.close()
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> GenerateClient:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()

    async def _request(
        self,
        ids: list[int],
        sampling: SamplingParams,
        n: int,
        timeout_s: float | None,
        extra: Mapping[str, Any],
        session: str | None,
    ) -> list[Generation]:
        self._check_ids(ids)
        copied = len(ids) <= COPIED_TOKENS and not extra  # fields of extra may belong to one prompt, such as its images
        fields = sampling.fields(n=1 if copied else n)
        cut = Truncation.of(fields, most=sampling.max_kept, vocab_size=self._vocab_size)
        top_logprobs = {} if cut is None else {"top_logprobs_num": cut.top_k}
        if cut is not None:
            fields["top_k"] = cut.top_k
        more = {"sampling_params": fields, "return_logprob": True, **top_logprobs, **extra}
        prompts = [ids] * n if copied else [ids]
        async with self._in_flight:
            if copied and session is None and timeout_s is None and sampling.max_new_tokens <= SHORT_RESPONSE:
                rows = await self._short.request(prompts, more)
            else:
                limit = _Limit(self._timeout_s if timeout_s is None else timeout_s, follows_progress=timeout_s is None)
                rows = await self._post_rows(prompts, more, n, limit, session)
        routes = self._routes if extra.get(ROUTES) else None
        return [NOTHING] * n if rows is None else [read_generation(row, routes, cut) for row in rows]

    async def _post_joined(self, prompts: list[list[int]], more: Mapping[str, Any]) -> list[Any] | None:
        return await self._post_rows(prompts, more, len(prompts), _Limit(self._timeout_s, follows_progress=True), None)

    async def _post_rows(
        self, prompts: list[list[int]], more: Mapping[str, Any], count: int, limit: _Limit, session: str | None
    ) -> list[Any] | None:
        """The ``count`` responses to one request; None: requests are being aborted."""
        body = {"input_ids": prompts if len(prompts) > 1 else prompts[0], **more}
        answer = await self._post(json.dumps(body).encode(), limit, session)
        if answer is None:
            return None
        rows = answer if isinstance(answer, list) else [answer]
        if len(rows) != count:
            raise EngineError(f"{self.url} sent {len(rows)} responses; {count} were requested")
        return rows

    def _check_ids(self, ids: Sequence[int]) -> None:
        if not ids:
            raise RequestRefused("A prompt has no tokens; it needs at least one")
        if self._vocab_size is not None and not 0 <= min(ids) <= max(ids) < self._vocab_size:
            wrong = [one for one in ids if not 0 <= one < self._vocab_size][:5]
            raise RequestRefused(
                f"A prompt has the ids {wrong}; the model knows 0 to {self._vocab_size - 1}. "
                "Encode prompts with the tokenizer of the model's folder."
            )

    async def _post(self, body: bytes, limit: _Limit, session: str | None) -> Any:
        """The answer; None: requests are being aborted, so it was not sent, or not retried."""
        attempts, failure = 0, _Failure("", "")
        failed: list[str] = []
        while not self._aborter.is_on:
            attempts += 1
            with self._targets.one(session=session, failed=failed) as url:
                found = await self._attempt(url, body, limit, session)
            if not isinstance(found, _Failure):
                return found
            failed.append(url)
            if attempts == 1 and self._restart_s and limit.follows_progress:
                limit.extend(time.monotonic() + self._restart_s)
            # A last attempt that ran into the limit says less than the failure before it.
            failure = failure if attempts > 1 and found.cause == TIMEOUT else found
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempts - 1)) * random.uniform(0.5, 1.0)
            if pause_s >= limit.left_s():
                raise RequestFailed(
                    f"{url}/generate gave no answer within {limit.seconds:g} s and {attempts} attempts; "
                    f"the last one failed with {failure.reason}. Are the engines alive?",
                    failure.cause,
                )
            await asyncio.sleep(pause_s)
        return None

    async def _attempt(self, url: str, body: bytes, limit: _Limit, session: str | None) -> Any:
        sending = asyncio.ensure_future(self._send(url, body, session))
        try:
            await self._wait_answer(sending, url, limit)
            if not sending.done():
                return _Failure(f"a TimeoutError{limit.unmoved}", TIMEOUT)
            status, content = sending.result()
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            return _Failure(repr(error), "engine_connection")
        except aiohttp.ClientResponseError as error:
            return _Failure(f"an answer that is no HTTP: {error!r}", MALFORMED)
        finally:
            sending.cancel()
        if status == OK:
            return _read(content)
        text = content.decode(errors="replace")[:BODY_SHOWN]
        if status in REFUSED:
            raise _refusal(status, url, text)
        return _Failure(f"status {status}: {text}", f"engine_status_{status}")

    async def _send(self, url: str, body: bytes, session: str | None) -> tuple[int, bytes]:
        headers, unlimited = session_headers(session), aiohttp.ClientTimeout()
        async with self._open().post(f"{url}/generate", data=body, timeout=unlimited, headers=headers) as response:
            return response.status, await response.read()

    async def _wait_answer(self, sending: asyncio.Future[tuple[int, bytes]], url: str, limit: _Limit) -> None:
        """Return when there is an answer, or when the limit has passed since the engines' last progress."""
        while not sending.done() and limit.left_s() > 0:
            await asyncio.wait([sending], timeout=min(limit.left_s(), limit.interval_s))
            if limit.follows_progress and not sending.done():
                limit.extend(self._progress.last_s(url, interval_s=limit.interval_s))

    async def _engines_behind(self, url: str) -> list[str]:
        return await self._aborter.engines() if url == self.url else [url]

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),  # InFlightLimit is the bound
                headers={"Content-Type": "application/json", **engine_headers(self.url)},
            )
        return self._session


class InFlightLimit:
    """At most ``places`` blocks ``async with limit`` run at once; others wait, and enter in the order of their coming.

    When a block ends, ``asyncio.Semaphore`` looks at all waiters whose turn has come and that have not run since. Where
    thousands of answers arrive at once, that takes the square of their number; here a place goes from hand to hand.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it had the place already
                self._leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        """Hand the place over to the first that still waits."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


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
        """Seconds left."""
        return self._deadline_s - time.monotonic()

    def extend(self, moved_s: float) -> None:
        """The engines computed at ``moved_s``, which is ``time.monotonic``'s."""
        self._deadline_s = max(self._deadline_s, moved_s + self.seconds)


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why an attempt failed that may be retried."""

    reason: str
    cause: str


def _refusal(status: int, url: str, text: str) -> EngineError:
    reported = f"{url}/generate refused the request with status {status}: {text}"
    if status in OVERLOADED:
        asks_less = "It is not sent again. Lower --sglang-server-concurrency."
        return RequestFailed(f"{reported}\n{asks_less}", OVERLOADED[status])
    shorter = "Leave out long prompts with --rollout-max-prompt-len, or lower --rollout-max-response-len."
    return RequestRefused(f"{reported}\n{' '.join(key_advice(status, url)) or shorter}")


def _read(content: bytes) -> Any:
    """The parsed answer, routes as numbers, or a failure."""
    try:
        rest, routes = take_routes(content)
        answer = parse_long_json(rest)
    except ValueError as error:
        return _Failure(f"an answer that is no JSON: {error}", MALFORMED)
    rows = answer if isinstance(answer, list) else [answer]
    if not all(map(_is_response, rows)):
        text = rest.decode(errors="replace")[:BODY_SHOWN]
        return _Failure(f"the answer {text}, which is no response of SGLang's", MALFORMED)
    for row in rows if routes else ():
        row["meta_info"] = put_back(row["meta_info"], routes)
    return answer


def _is_response(row: Any) -> bool:
    meta = row.get("meta_info") if isinstance(row, dict) else None
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    return isinstance(reason, dict) and "type" in reason and isinstance(row.get("output_ids"), list)


ROUTING_KEY = "x-smg-routing-key"
"""The header by which sglang-router 0.3.2 keeps a session with one engine (policies ``consistent_hashing``,
``manual``)."""


class Targets:
    """Chooses among ``urls``: the one of the session, or the one with the fewest requests in flight.

    A session belongs to the URL with the highest hash of both (rendezvous hashing): every process chooses the same URL,
    and adding or removing an engine moves few sessions. After a failure the other URLs are tried first.

    Engines are addressed directly where the router would drop a field of the request: sglang-router 0.3.2 forwards only
    the fields that it knows, and ``return_routed_experts`` is not among them.

    Arguments:
        urls: of engines; or of a router alone.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._in_flight = Counter(dict.fromkeys(urls, 0))

    @contextmanager
    def one(self, *, session: str | None, failed: Sequence[str] = ()) -> Iterator[str]:
        """The URL for one attempt; it counts as in flight inside the block.

        Arguments:
            session: id of the conversation; None: the request belongs to none.
            failed: URLs at which this request has failed, once for each failure.
        """
        chosen = self._choose(session, failed)
        self._in_flight[chosen] += 1
        try:
            yield chosen
        finally:
            self._in_flight[chosen] -= 1

    def _choose(self, session: str | None, failed: Sequence[str]) -> str:
        if session is None and not failed:  # nearly always, and a run may have hundreds of engines
            return min(self._in_flight, key=self._in_flight.__getitem__)
        failures = Counter(failed)
        return min(self._in_flight, key=lambda url: (failures[url], self._rank(url, session)))

    def _rank(self, url: str, session: str | None) -> int:
        if session is None:
            return self._in_flight[url]
        return -int.from_bytes(blake2b(f"{session} {url}".encode(), digest_size=8).digest(), "big")


def session_headers(session: str | None) -> dict[str, str]:
    """The header by which a router keeps the requests of a session at one engine."""
    return {} if session is None else {ROUTING_KEY: session}


OK = 200

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
    ignored: the requests of an engine that does not answer end by their own limit.

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
        """URLs of the engines of the router; an engine itself has no such list."""
        match await self.get(f"{self._url}/workers"):
            case (200, {"workers": [*entries]}):
                return [entry["url"] for entry in entries if isinstance(entry, dict) and "url" in entry]
        return [self._url]

    async def get(self, url: str) -> tuple[int, Any]:
        """Status and parsed answer at ``url``; status 0: there was none."""
        return await self._call("GET", url)

    async def _call(self, method: str, url: str) -> tuple[int, Any]:
        limit, body = aiohttp.ClientTimeout(total=ABORT_LIMIT_S), {"abort_all": True} if method == "POST" else None
        with suppress(*OUT_OF_REACH, ValueError):
            async with self._session().request(method, url, json=body, timeout=limit) as response:
                return response.status, await response.json(content_type=None) if response.status == OK else None
        return 0, None


def read_generation(
    row: Mapping[str, Any], routes: tuple[int, int] | None, cut: Truncation | None = None
) -> Generation:
    """One response of an engine.

    Arguments:
        row: as SGLang's ``/generate`` sends it, but for routes, which are numbers (:mod:`.routes`).
        routes: layers of the model and experts per token, where routes were requested.
        cut: the top-p and top-k limits, where log-probabilities are those of the truncated distribution.

    Raises:
        EngineError: the answer contradicts itself, or a field is missing or of another type.
    """
    try:
        return _generation(row, routes, cut)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as problem:
        reported = f"The engine sent a response that is none of SGLang's ({problem!r}): {str(row)[:BODY_SHOWN]}"
        raise EngineError(reported) from problem


def _generation(row: Mapping[str, Any], routes: tuple[int, int] | None, cut: Truncation | None) -> Generation:
    meta = row["meta_info"]
    token_ids, entries = row["output_ids"], meta.get("output_token_logprobs") or []
    if len(token_ids) != len(entries):
        raise EngineError(f"The engine sent {len(token_ids)} tokens with {len(entries)} log-probabilities")
    kept, log_probs = None, array("f", [entry[0] for entry in entries])
    if cut is not None:
        kept, log_probs = truncate(token_ids, log_probs, meta.get("output_top_logprobs") or [], cut)
    reason = meta["finish_reason"]["type"]
    if reason not in ("stop", "length", "abort"):
        raise EngineError(f"The engine ended a response with {meta['finish_reason']}; known are stop, length and abort")
    spans = meta.get("weight_versions") or [{"version": meta.get("weight_version", "")}]
    return Generation(
        token_ids=array("i", token_ids),
        log_probs=log_probs,
        finish_reason=cast(FinishReason, reason),
        weight_versions=tuple(dict.fromkeys(span["version"] for span in spans)),
        text=row.get("text") or "",
        routed_experts=None if routes is None else shaped(meta, *routes),
        weight_spans=tuple(_span(span, len(token_ids)) for span in spans if span["version"]),
        spec_info=spec_info(meta),
        kept=kept,
        prompt_tokens=meta.get("prompt_tokens"),
    )


def _span(span: Mapping[str, Any], count: int) -> tuple[str, int, int]:
    return span["version"], span.get("start", 0), span.get("end", count)


def spec_info(meta: Mapping[str, Any]) -> SpecInfo | None:
    """Counters of speculative decoding in ``meta_info`` (sglang 0.5.23, srt/managers/tokenizer_manager.py:3150); None:
    the engine does not speculate. A draft proposes tokens; the model verifies them in one pass and keeps a part."""
    if "spec_verify_ct" not in meta:
        return None
    return SpecInfo(
        spec_accept_token_num=int(meta.get("spec_num_correct_drafts", 0)),
        spec_draft_token_num=int(meta.get("spec_num_proposed_drafts", 0)),
        spec_verify_ct=int(meta["spec_verify_ct"]),
        completion_token_num=int(meta.get("completion_tokens", 0)),
    )


def spec_metrics(samples: Iterable[Sample]) -> dict[str, float]:
    """``rollout/spec/accept_rate``, accepted of the drafted tokens, and ``rollout/spec/accept_length``, tokens a
    verification pass; none where no engine speculates."""
    infos = [sample.spec_info for sample in samples if sample.spec_info.spec_verify_ct]
    if not infos:
        return {}
    drafted, passes = (sum(info.spec_draft_token_num for info in infos), sum(info.spec_verify_ct for info in infos))
    accepted, tokens = (
        sum(info.spec_accept_token_num for info in infos),
        sum(info.completion_token_num for info in infos),
    )
    return {
        "rollout/spec/accept_rate": accepted / drafted if drafted else 0.0,
        "rollout/spec/accept_length": tokens / passes,
    }
