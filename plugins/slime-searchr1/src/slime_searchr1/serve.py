"""The command ``slime searchr1 serve``: the built-in retriever over HTTP, for several runs or another machine."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slime_core.errors import ConfigError
from slime_searchr1.index import CORPUS, Index, read_corpus

__all__ = ["main", "serving"]

LARGEST_REQUEST = 2**20
"""Limit on the body of a request, in bytes."""

EPILOG = """examples:
  slime searchr1 serve                                the facts of the invented world, on port 8000 of this machine
  slime searchr1 serve --corpus wiki.jsonl --port 0   passages of yours, on a free port

Use it in a run with --search-url http://127.0.0.1:8000/retrieve.
"""


class _Request(BaseModel):
    """The body of ``POST /retrieve``."""

    model_config = ConfigDict(strict=True)

    queries: list[str] = Field(max_length=1024)
    topk: int | None = Field(None, ge=1, le=100)
    return_scores: bool = False


def main(argv: Sequence[str]) -> int:
    """Serve until Ctrl-C or SIGTERM; return the exit code.

    Raises:
        DataError: the corpus cannot be read.
        ConfigError: the server cannot listen on the address.
    """
    options = _parser().parse_args(argv)
    index = Index(read_corpus(options.corpus))
    print(f"{len(index)} passages of {options.corpus}", flush=True)
    try:
        asyncio.run(_serve(index, options))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="slime searchr1", description="Search-R1.", allow_abbrev=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    serve = commands.add_parser(
        "serve",
        help="the built-in BM25 retriever over HTTP",
        description="POST /retrieve, as the retriever of the paper's repository; GET /health.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    serve.add_argument(
        "--corpus", metavar="FILE", type=Path, default=CORPUS, help='JSON Lines with "contents" [the invented world]'
    )
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on [127.0.0.1: this machine only]")
    serve.add_argument("--port", type=int, default=8000, help="0: a free one [8000]")
    serve.add_argument("--topk", type=int, default=3, help="passages of a request that names no number [3]")
    return parser


async def _serve(index: Index, options: argparse.Namespace) -> None:
    async with serving(index, host=options.host, port=options.port, topk=options.topk) as url:
        print(f"--search-url {url}", flush=True)
        await asyncio.Event().wait()


@asynccontextmanager
async def serving(index: Index, *, host: str = "127.0.0.1", port: int = 0, topk: int = 3) -> AsyncIterator[str]:
    """Serve ``index`` while the context is open; yields the URL of ``/retrieve``.

    Raises:
        ConfigError: the server cannot listen on the address.
    """
    application = web.Application(client_max_size=LARGEST_REQUEST)
    application.add_routes([web.post("/retrieve", _handler(index, topk)), web.get("/health", _health)])
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except (OSError, OverflowError) as problem:
            raise ConfigError(f"slime searchr1 serve: {host}:{port} cannot be listened on: {problem}") from problem
        address = runner.addresses[0]
        yield f"http://{host}:{address[1]}/retrieve"
    finally:
        await runner.cleanup()


async def _health(request: web.Request) -> web.Response:
    del request
    return web.json_response({"status": "ok"})


def _handler(index: Index, topk: int) -> Any:
    async def retrieve(request: web.Request) -> web.Response:
        try:
            query_request = _Request.model_validate_json(await request.read())
        except ValidationError as problem:
            errors = (f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in problem.errors())
            return web.json_response({"detail": "; ".join(errors)}, status=400)
        return web.json_response({"result": await asyncio.to_thread(_answers, index, query_request, topk)})

    return retrieve


def _answers(index: Index, query_request: _Request, topk: int) -> list[list[dict[str, object]]]:
    results = [index.search(query, query_request.topk or topk) for query in query_request.queries]
    if not query_request.return_scores:
        return [[{"contents": passage.contents} for passage in passages] for passages in results]
    return [
        [{"document": {"contents": passage.contents}, "score": passage.score} for passage in passages]
        for passages in results
    ]
