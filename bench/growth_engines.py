"""Engines without a model that answer at once, all in one process; :mod:`bench.growth` measures a sampler with them.

    python -m bench.growth_engines 64 --vocab-size 16      prints their URLs, and serves until its input ends

An answer has every field of SGLang's, with numbers as long as SGLang's: ``tests/engines/test_engine_contract.py`` holds
it to the real one. Its ids are a fixed sequence, and so are its log-probabilities, so one answer of each shape is made.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import uvloop

BACKLOG = 4096
"""Limit on connections waiting to be accepted per port; the kernel's limit (net.core.somaxconn) is often the same."""

FIRST_ID = 5
"""Ids below this are special tokens in the models of this repository."""


class Answers:
    """Answers of every engine.

    Arguments:
        vocab_size: ids of responses are below it.
        context_length: limit on prompt plus response, in tokens; longer requests are refused.
    """

    def __init__(self, *, vocab_size: int, context_length: int) -> None:
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._made = cache(self._make)

    def to(self, path: bytes, body: bytes) -> bytes:
        """Return the response to one request, including its head."""
        if path == b"/flush_cache":
            return _http(200, "Cache flushed.")
        if path != b"/generate":
            return _http(404, {"detail": "Not Found"})
        request = json.loads(body)
        sampling, ids = request["sampling_params"], request["input_ids"]
        copies, count = (len(ids), len(ids[0])) if isinstance(ids[0], list) else (sampling.get("n", 1), len(ids))
        if count + sampling["max_new_tokens"] > self._context_length:
            return _http(400, {"error": {"message": "The request exceeds the model's maximum context length"}})
        stops = tuple(sampling.get("stop_token_ids") or ())
        return self._made(count, copies, sampling["max_new_tokens"], stops)

    def _make(self, prompt_tokens: int, n: int, longest: int, stops: tuple[int, ...]) -> bytes:
        rows = [self._row(number, prompt_tokens, longest, stops) for number in range(n)]
        return _http(200, rows if n > 1 else rows[0])

    def _row(self, number: int, prompt_tokens: int, longest: int, stops: tuple[int, ...]) -> dict[str, Any]:
        source = random.Random(number)
        sampled = [(source.randrange(FIRST_ID, self._vocab_size), -source.expovariate(2)) for _ in range(longest)]
        end = next((place for place, (token, _) in enumerate(sampled) if token in stops), None)
        taken = sampled if end is None else sampled[: end + 1]
        count, ids = len(taken), [token for token, _ in taken]
        reason = {"type": "length", "length": count} if end is None else {"type": "stop", "matched": ids[-1]}
        meta = {
            "id": f"{source.getrandbits(128):032x}",
            "finish_reason": reason,
            "prompt_tokens": prompt_tokens,
            "weight_version": "default",
            "num_retractions": 0,
            "input_token_logprobs": [],
            "output_token_logprobs": [[log_prob, token, None] for token, log_prob in taken],
            "output_token_logprobs_length": count,
            "reasoning_tokens": 0,
            "completion_tokens": count,
            "cached_tokens": 0,
            "weight_versions": [{"version": "default", "start": 0, "end": count}],
            "cached_tokens_details": {"device": 0, "host": 0},
            "dp_rank": None,
            "e2e_latency": source.random(),
            "response_sent_to_client_ts": 1.7e9 + source.random(),
        }
        return {"text": " word" * count, "output_ids": ids, "meta_info": meta}


def _http(status: int, content: Any) -> bytes:
    body = json.dumps(content, separators=(",", ":")).encode()
    head = f"HTTP/1.1 {status} Status\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class _Connection(asyncio.Protocol):
    """One connection; it stays open."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (head_end := self._received.find(b"\r\n\r\n")) >= 0:
            first, *fields = bytes(self._received[:head_end]).lower().split(b"\r\n")
            lengths = [int(one.split(b":")[1]) for one in fields if one.startswith(b"content-length:")]
            end = head_end + 4 + sum(lengths)
            if len(self._received) < end:
                return
            body = bytes(self._received[head_end + 4 : end])
            del self._received[:end]
            self._transport.write(self._answers.to(first.split(b" ")[1].partition(b"?")[0], body))


async def serve(count: int, answers: Answers) -> None:
    """Listen at ``count`` ports of the loopback address and print their URLs, until the standard input ends."""
    loop = asyncio.get_running_loop()
    sockets = [socket.create_server(("127.0.0.1", 0), backlog=BACKLOG) for _ in range(count)]
    for one in sockets:
        await loop.create_server(lambda: _Connection(answers), sock=one, backlog=BACKLOG)
    print(json.dumps([f"http://127.0.0.1:{one.getsockname()[1]}" for one in sockets]), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


@contextmanager
def engines(count: int, *, vocab_size: int, context_length: int = 32768) -> Iterator[list[str]]:
    """Start ``count`` engines in a separate process; yields their URLs."""
    sizes = ["--vocab-size", str(vocab_size), "--context-length", str(context_length)]
    command = [sys.executable, "-m", __name__, str(count), *sizes]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
    finally:
        process.communicate()  # closes its input


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--context-length", type=int, default=32768)
    given = parser.parse_args()
    answers = Answers(vocab_size=given.vocab_size, context_length=given.context_length)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(given.count, answers))


if __name__ == "__main__":
    main()
