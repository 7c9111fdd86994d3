"""Adds the run's key to engine requests of functions named by path, which were written for engines without a key.

slime's functions post to ``http://{args.sglang_router_ip}:{args.sglang_router_port}`` with any HTTP library. In a
process that loads such a function, aiohttp, httpx and all libraries based on ``http.client`` (requests, urllib3,
urllib) send the key to servers of the run. Requests to any other address are unchanged. A program that a function
starts, such as curl, gets no key.
"""

from __future__ import annotations

import sys
from functools import cache, wraps
from http.client import HTTPConnection
from importlib import import_module
from typing import Any

from slime_core.services import engine_headers

__all__ = ["carry_key"]


def carry_key(text: bytes | None) -> None:
    """Patch this process's HTTP libraries so that requests to servers of the run have the key.

    Arguments:
        text: text of the function's file; libraries that it mentions are imported and patched, because it may import
            them only when it is called. None: the file cannot be read.
    """
    _http_client()
    for name, change in (("aiohttp", _aiohttp), ("httpx", _httpx)):
        if name in sys.modules or (text is not None and name.encode() in text):
            change()


@cache
def _aiohttp() -> None:
    import aiohttp

    send = aiohttp.ClientSession._request

    @wraps(send)
    async def with_key(self: Any, method: str, str_or_url: Any, **options: Any) -> Any:
        if key := engine_headers(str(self._build_url(str_or_url))):
            pairs = dict(options.get("headers") or {}).items()
            options["headers"] = [*(pair for pair in pairs if pair[0].lower() != "authorization"), *key.items()]
        return await send(self, method, str_or_url, **options)

    changed: Any = with_key
    aiohttp.ClientSession._request = changed  # type: ignore[method-assign]


@cache
def _httpx() -> None:
    httpx: Any = import_module("httpx")  # not a dependency: the function's file imports it
    send, send_async = httpx.Client.send, httpx.AsyncClient.send

    @wraps(send)
    def with_key(self: Any, request: Any, **options: Any) -> Any:
        request.headers.update(engine_headers(str(request.url)))
        return send(self, request, **options)

    @wraps(send_async)
    async def with_key_async(self: Any, request: Any, **options: Any) -> Any:
        request.headers.update(engine_headers(str(request.url)))
        return await send_async(self, request, **options)

    httpx.Client.send, httpx.AsyncClient.send = with_key, with_key_async


@cache
def _http_client() -> None:
    end = HTTPConnection.endheaders

    @wraps(end)
    def with_key(self: Any, *arguments: Any, **named: Any) -> None:
        for name, value in engine_headers(f"http://{self.host}:{self.port}").items():
            # http.client collects the lines of a request in this buffer until its headers end.
            self._buffer = [line for line in self._buffer if not line.lower().startswith(name.lower().encode() + b":")]
            self.putheader(name, value)
        end(self, *arguments, **named)

    HTTPConnection.endheaders = with_key  # type: ignore[method-assign]
