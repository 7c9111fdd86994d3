"""A fake inference server: the endpoints, refusals and pauses of SGLang's server, without a model, and with faults on
demand.

The next token is ``(sum of the ids so far) mod (vocabulary - 2) + 2``. A response ends with id 1 after four tokens, or
earlier if the letters of its ids contain a stop text or match a pattern; every token has the log-probability -0.5.
``tests/engines/test_engine_contract.py`` runs the same assertions against it and against the real server.

The fake is stricter if the real server would crash or use memory that it has released, which a CPU does not show:
memory can be released once, while the engine does not generate, and resumed once; generating needs all of it, and
updating needs the weights.

Concurrency: handlers run in the event loop of the server's thread; the test reads and sets attributes from another
thread, between requests.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from aiohttp import web

from slime_core.types import JsonValue

__all__ = ["Answer", "FakeEngine", "FakeServer", "Handler"]


START_LIMIT_S = 60.0

ACCEPT_TURNS = 4
"""Event loop turns from an accepted socket to a connection that the server can close."""

CLOSE_TURNS = 2
"""Event loop turns from a request to close a connection to the closed socket."""

HOLD_INTERVAL_S = 0.005

Answer = tuple[int, JsonValue]
"""HTTP status, and body as JSON."""

Handler = Callable[[dict[str, JsonValue]], Coroutine[None, None, Answer]]
"""Maps the parsed body of a request to the answer."""


class FakeServer(ABC):
    """Listens on a loopback port from :meth:`start` to :meth:`stop`; usable as a context manager.

    Arguments:
        faulty: path whose requests meet ``faults``.
        key: required as ``Authorization: Bearer``, except for /health; empty: no key.

    Attributes:
        url: base URL, valid once started.
        calls: the requested paths, in order.
        headers: headers of each request to ``faulty``, in order.
        faults: faults of the next requests to ``faulty``, in order: ``reset``: the connection is reset; ``torn``: it is
            reset within an answer; ``garbage``: the answer is not JSON; ``hang``: there is no answer.
    """

    def __init__(self, *, faulty: str, key: str = "") -> None:
        self.url = ""
        self.calls: list[str] = []
        self.headers: list[Mapping[str, str]] = []
        self.faults: list[str] = []
        self._faulty = faulty
        self._key = key
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=type(self).__name__, daemon=True)
        self._ready = threading.Event()
        self._stopping = asyncio.Event()

    @abstractmethod
    def handlers(self) -> Mapping[str, Handler]:
        """Return path -> handler; any other path is answered with 404."""

    def start(self) -> None:
        """Start to listen at ``url``."""
        self._thread.start()
        if not self._ready.wait(START_LIMIT_S):
            raise TimeoutError(f"the {type(self).__name__} did not start")

    def stop(self) -> None:
        """Stop to listen, and reset open connections."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(START_LIMIT_S)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def _answer(self, request: web.Request) -> web.Response:
        self.calls.append(request.path)
        allowed = not self._key or request.headers.get("Authorization") == f"Bearer {self._key}"
        if not allowed and not request.path.startswith("/health"):
            return web.json_response({"error": "Unauthorized"}, status=401)
        handler = self.handlers().get(request.path)
        if handler is None:
            return web.json_response({"error": "not found"}, status=404)
        body = await request.json() if request.can_read_body else {}
        if request.path == self._faulty:
            self.headers.append(request.headers)
            if self.faults:
                return await self._fail(request, self.faults.pop(0))
        status, answer = await handler(body)
        return web.json_response(answer, status=status)

    async def _fail(self, request: web.Request, fault: str) -> web.Response:
        if fault == "garbage":
            return web.Response(text="no JSON {", content_type="application/json")
        if fault == "hang":
            await self._stopping.wait()
        if fault == "torn":
            torn = web.StreamResponse(headers={"Content-Length": "1000"})
            await torn.prepare(request)
            await torn.write(b'{"text": "')
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._listen())

    async def _listen(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        server = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await server.setup()
        listening = socket.create_server(("127.0.0.1", 0))
        await web.SockSite(server, listening).start()
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self._ready.set()
        await self._stopping.wait()
        # In Python 3.11, a server that closes while it accepts leaks the socket (Server._attach): stop accepting first.
        self._loop.remove_reader(listening)
        await _turns(ACCEPT_TURNS)
        await server.cleanup()
        await _turns(CLOSE_TURNS)


async def _turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


ROUTING_KEY = "x-smg-routing-key"
"""The header by which a router keeps a session with one engine."""

END = 1
ANSWER_LENGTH = 4
MEMORY = ("kv_cache", "weights", "cuda_graph")
"""Memory that can be released; GPU_MEMORY_ALL_TYPES of sglang 0.5.23, srt/constants.py."""

NO_MEMORY = "the memory of the weights is released"
LOG_PROB = -0.5


class FakeEngine(FakeServer):
    """The fake engine; ``faults`` apply to generate requests.

    Arguments:
        vocab_size: size of the vocabulary.
        context_length: limit on prompt plus response, in tokens; longer requests are refused.
        version: weight version until the first update.
        key: like SGLang's ``--api-key``.

    Attributes:
        answers: ids of the next responses, in order, each followed by id 1; if empty, ids are computed as above.
        sampled: prompt and response of every generation, in order.
        loaded: names of the weights of the last update.
        joined: rank and size of the update group that was joined last.
        released: tags of the released memory.
        spoiled: True: the weights are random until the next update, and the checksum is meaningless.
        fail_with: HTTP statuses of the next generate requests, in order.
        delay_s: duration of every generate request, in seconds.
        holds: True: generate requests start, and end only once it is False or they are aborted.
        partial: number of tokens of a response that is aborted.
        stuck: True: the counters (``/v1/loads``) do not change; else each read of them during generation, and each
            answer, is one more decode step.
        finished: number of responses that are complete and wait for the others of their requests.
        aborts: True: every response is aborted once its request has started.
        most_in_flight: maximum of concurrent generate requests; requests that wait for a paused engine do not count.
        info: additional fields of its server info.
        meta: additional fields of every answer's ``meta_info``.
        bodies: parsed body of each generate request, in order.
    """

    def __init__(
        self, *, vocab_size: int = 16, context_length: int = 128, version: str = "default", key: str = ""
    ) -> None:
        super().__init__(faulty="/generate", key=key)
        self.answers: list[list[int]] = []
        self.sampled: list[tuple[list[int], list[int]]] = []
        self.loaded: list[str] = []
        self.joined: tuple[int, int] | None = None
        self.released: set[str] = set()
        self.spoiled = False
        self.fail_with: list[int] = []
        self.delay_s = 0.0
        self.holds = False
        self.partial = 0
        self.stuck = False
        self.finished = 0
        self.aborts = False
        self.most_in_flight = 0
        self.info: dict[str, JsonValue] = {}
        self.meta: dict[str, JsonValue] = {}
        self.bodies: list[dict[str, JsonValue]] = []
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._in_flight = 0
        self._sequences = 0
        self._steps = 0
        self._keeps_running = False
        self._version = version
        self._updating = False
        self._groups: set[str] = set()
        self._running = asyncio.Event()
        self._running.set()
        self._aborted = asyncio.Event()

    @property
    def keys(self) -> list[str | None]:
        """Routing key of each generate request, in order; None if it had none."""
        return [headers.get(ROUTING_KEY) for headers in self.headers]

    @staticmethod
    def text(ids: Sequence[int]) -> str:
        """Decode ``ids``: one letter each, beginning with "a"."""
        return "".join(chr(ord("a") + token) for token in ids)

    # --- Handlers ----------------------------------------------------------------------------------------------------

    async def _generate(self, body: dict[str, Any]) -> Answer:
        self.bodies.append(body)
        if self.fail_with:
            return self.fail_with.pop(0), {"error": {"message": "failure set by the test"}}
        ids, sampling = body["input_ids"], body["sampling_params"]
        prompts = ids if ids and isinstance(ids[0], list) else [ids]
        if not all(prompts):
            return 400, {"error": {"message": "input_ids cannot be empty."}}
        if max(map(len, prompts)) + sampling["max_new_tokens"] > self._context_length:
            return 400, {"error": {"message": "longer than the model's maximum context length"}}
        n = sampling.get("n", 1)
        self._sequences += len(prompts) * n
        try:
            is_aborted = await self._is_aborted()
        finally:
            self._sequences -= len(prompts) * n
        self._steps += not self.stuck
        if self.released:
            return 400, {"error": {"message": f"nothing can be generated without {sorted(self.released)}"}}
        respond = self._respond_in_part if is_aborted else self._respond
        rows = [respond(prompt, sampling) for prompt in prompts for _ in range(n)]
        if top := body.get("top_logprobs_num", 0):
            for row in rows:
                row["meta_info"]["output_top_logprobs"] = [self._likeliest(token, top) for token in row["output_ids"]]
        if body.get("return_sampling_mask"):
            for row in rows:
                row["meta_info"] |= self._masks(row["output_ids"], sampling)
        return 200, rows if len(rows) > 1 else rows[0]

    async def _is_aborted(self) -> bool:
        """Wait for the configured time; return whether the request was aborted meanwhile. A request that arrives
        while the engine is paused starts when the engine resumes."""
        await self._running.wait()
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        working, aborted = asyncio.create_task(self._work()), asyncio.create_task(self._wait_for_abort())
        done, pending = await asyncio.wait([working, aborted], return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        self._in_flight -= 1
        return aborted in done or self.aborts

    async def _work(self) -> None:
        await asyncio.sleep(self.delay_s)
        while self.holds:
            await asyncio.sleep(HOLD_INTERVAL_S)
        await self._running.wait()

    async def _wait_for_abort(self) -> None:
        """Wait for an abort. After a pause in place, an aborted request ends when the engine resumes."""
        await self._aborted.wait()
        if self._keeps_running:
            await self._running.wait()

    def _respond(self, prompt: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
        stops = {END, *sampling.get("stop_token_ids", [])}
        scripted = self.answers.pop(0) if self.answers else []
        ids: list[int] = []
        matched: Any = None
        while len(ids) < sampling["max_new_tokens"] and matched is None:
            ids.append(scripted[len(ids)] if len(ids) < len(scripted) else self._next(prompt, ids, after=len(scripted)))
            texts = [stop for stop in sampling.get("stop", []) if stop in self.text(ids)]
            texts += [stop for stop in sampling.get("stop_regex", []) if re.search(stop, self.text(ids))]
            matched = ids[-1] if ids[-1] in stops else next(iter(texts), None)
        self.sampled.append((list(prompt), list(ids)))
        reason = {"type": "length", "length": len(ids)} if matched is None else {"type": "stop", "matched": matched}
        meta = {
            "finish_reason": reason,
            "weight_versions": [{"version": self._version, "start": 0, "end": len(ids)}],
            "output_token_logprobs": [[LOG_PROB, stop, None] for stop in ids],
            **self.meta,
        }
        return {"text": "", "output_ids": ids, "meta_info": meta}

    def _respond_in_part(self, prompt: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
        row = self._respond(prompt, {**sampling, "max_new_tokens": min(self.partial, sampling["max_new_tokens"])})
        row["meta_info"]["finish_reason"] = {"type": "abort", "message": "Abort"}
        return row

    def _likeliest(self, sampled: int, count: int) -> list[list[Any]]:
        """Return the sampled token as the likeliest; all others are equally unlikely, in the order of their ids."""
        others = [token for token in range(self._vocab_size) if token != sampled][: count - 1]
        other_log_prob = math.log(-math.expm1(LOG_PROB) / (self._vocab_size - 1))
        return [[LOG_PROB, sampled, None], *([other_log_prob, token, None] for token in others)]

    def _masks(self, ids: Sequence[int], sampling: dict[str, Any]) -> dict[str, Any]:
        """Return the tokens that each of ``ids`` was sampled from, and its log-probability among them."""
        masks, log_probs = [], []
        for sampled in ids:
            mass, mask = 0.0, list[int]()
            for log_prob, token, _ in self._likeliest(sampled, sampling["top_k"]):
                if mass > sampling["top_p"] or log_prob - LOG_PROB < math.log(sampling.get("min_p", 0.0) or 1e-9):
                    break
                mass += math.exp(log_prob)
                mask.append(token)
            masks.append(mask)
            log_probs.append(LOG_PROB - math.log(mass))
        return {"output_token_sampling_mask": masks, "output_token_sampling_logprobs": log_probs}

    def _next(self, prompt: list[int], ids: list[int], *, after: int) -> int:
        ends = len(ids) >= after > 0 or len(ids) == ANSWER_LENGTH
        return END if ends else sum([*prompt, *ids]) % (self._vocab_size - 2) + 2

    async def _model_info(self, _: dict[str, Any]) -> Answer:
        return 200, {"weight_version": self._version}

    async def _server_info(self, _: dict[str, Any]) -> Answer:
        return 200, {"weight_version": self._version, **self.info}

    async def _loads(self, _: dict[str, Any]) -> Answer:
        if self._in_flight and self._running.is_set() and not self.stuck:
            self._steps += 1
        load: dict[str, JsonValue] = {
            "decode_moments": [float(self._steps)],
            "num_used_tokens": self._in_flight,
            "num_running_reqs": max(0, self._sequences - self.finished),
            "num_waiting_reqs": 0,
        }
        return 200, {"loads": [load]}

    async def _readiness(self, _: dict[str, Any]) -> Answer:
        return (200, None) if self._running.is_set() else (503, None)

    async def _pause(self, body: dict[str, Any]) -> Answer:
        self._running.clear()
        self._keeps_running = body.get("mode") == "in_place"
        if body.get("mode") == "abort":
            self._abort_all()
            while self._in_flight:
                await asyncio.sleep(0)
        return _success()

    async def _abort(self, body: dict[str, Any]) -> Answer:
        if body.get("abort_all"):
            self._abort_all()
        return 200, None

    def _abort_all(self) -> None:
        self._aborted.set()
        self._aborted = asyncio.Event()

    async def _continue(self, _: dict[str, Any]) -> Answer:
        self._running.set()
        return _success()

    async def _begin(self, _: dict[str, Any]) -> Answer:
        if self._updating:
            return _refusal("a weight-update session is already open")
        if "weights" in self.released:
            return _refusal(NO_MEMORY)
        self._updating = True
        self.loaded = []
        return _success()

    async def _end(self, _: dict[str, Any]) -> Answer:
        if not self._updating:
            return _refusal("no weight-update session is open")
        self._updating = False
        return _success()

    async def _init_group(self, body: dict[str, Any]) -> Answer:
        self._groups.add(body["group_name"])
        self.joined = body["rank_offset"], body["world_size"]
        return _success()

    async def _destroy_group(self, body: dict[str, Any]) -> Answer:
        if body["group_name"] not in self._groups:
            return _refusal("The group to be destroyed does not exist.")
        self._groups.remove(body["group_name"])
        return _success()

    async def _update_distributed(self, body: dict[str, Any]) -> Answer:
        refused = self._refused("update_weights_from_distributed")
        if refused is None and body["group_name"] not in self._groups:
            refused = _refusal(f"Group {body['group_name']} not in {sorted(self._groups)}")
        return refused or self._updated(body, names=body["names"])

    async def _update_tensor(self, body: dict[str, Any]) -> Answer:
        # The payload is a pickle, and this process must not unpickle.
        return self._refused("update_weights_from_tensor") or self._updated(body, names=[])

    async def _update_disk(self, body: dict[str, Any]) -> Answer:
        if "weights" in self.released:
            return _refusal(NO_MEMORY)
        if not list(Path(body["model_path"]).glob("*.safetensors")):
            return _refusal(f"Failed to get weights iterator: no weights in {body['model_path']}")
        return self._updated(body, names=[])

    def _refused(self, update: str) -> Answer | None:
        if not self._updating:
            return _refusal(f"{update} must run between begin_weight_update() and end_weight_update()")
        return _refusal(NO_MEMORY) if "weights" in self.released else None

    def _updated(self, body: dict[str, Any], *, names: list[str]) -> Answer:
        if body.get("flush_cache", True) and self._in_flight and self._keeps_running:
            return _refusal("Weights were updated, but the cache was not flushed because requests are still running")
        self.loaded += names
        self.spoiled = False
        self._version = body.get("weight_version") or self._version
        return _success()

    async def _parse_calls(self, body: dict[str, Any]) -> Answer:
        """Return tool calls of known functions, as SGLang's parser ``qwen25`` finds them."""
        if body["tool_call_parser"] != "qwen25":
            return 500, "Internal Server Error"
        text, start, end = body["text"], "<tool_call>\n", "\n</tool_call>"
        names = [tool["function"]["name"] for tool in body["tools"]]
        calls = []
        for written in re.findall(f"{start}(.*?){end}", text, re.DOTALL):
            with suppress(json.JSONDecodeError):
                call = json.loads(written)
                if call["name"] in names:
                    parameters = json.dumps(call.get("arguments", {}), ensure_ascii=False)
                    at = names.index(call["name"])
                    calls.append({"tool_index": at, "name": call["name"], "parameters": parameters})
        normal = text.partition(start)[0].strip() if start in text else text
        return 200, {"normal_text": normal, "calls": calls}

    async def _set_version(self, body: dict[str, Any]) -> Answer:
        self._version = body["new_version"]
        return _success()

    async def _check_weights(self, body: dict[str, Any]) -> Answer:
        action = body.get("action", "checksum")
        if action == "reset_tensors":
            self.spoiled = True
            return _success()
        if action != "checksum":
            return _refusal(f"Unsupported {action=}")
        total = hashlib.sha256(repr(self.spoiled).encode()).hexdigest()
        return 200, {"success": True, "ranks": [{"checksums": {"fake": total[:16]}}], "per_engine_checksum": total}

    async def _release(self, body: dict[str, Any]) -> Answer:
        tags = set(body.get("tags") or MEMORY)
        if self._in_flight and (self._running.is_set() or self._keeps_running):
            return _refusal("release_memory_occupation should be called only when server is idle.")
        if not tags.issubset(MEMORY) or tags & self.released:
            return _refusal(f"cannot release {sorted(tags)}; released already: {sorted(self.released)}")
        self.released |= tags
        return 200, None

    async def _resume(self, body: dict[str, Any]) -> Answer:
        tags = set(body.get("tags") or MEMORY)
        if not tags <= self.released:
            return _refusal(f"cannot resume {sorted(tags)}; released: {sorted(self.released)}")
        self.released -= tags
        return 200, None

    async def _nothing(self, _: dict[str, Any]) -> Answer:
        return _success()

    def handlers(self) -> Mapping[str, Handler]:
        """Return SGLang's endpoints that the fake implements."""
        return {
            "/generate": self._generate,
            "/health": self._nothing,  # a router requests it once, to learn that the engine speaks HTTP
            "/model_info": self._model_info,
            "/parse_function_call": self._parse_calls,
            "/server_info": self._server_info,
            "/v1/loads": self._loads,
            "/ready": self._readiness,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._nothing,
            "/abort_request": self._abort,
            "/begin_weight_update": self._begin,
            "/end_weight_update": self._end,
            "/init_weights_update_group": self._init_group,
            "/destroy_weights_update_group": self._destroy_group,
            "/update_weights_from_distributed": self._update_distributed,
            "/update_weights_from_tensor": self._update_tensor,
            "/update_weights_from_disk": self._update_disk,
            "/update_weight_version": self._set_version,
            "/weights_checker": self._check_weights,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._resume,
        }


def _success() -> Answer:
    return 200, {"success": True, "message": "Success"}


def _refusal(message: str) -> Answer:
    return 400, {"success": False, "message": message}
