"""The experts of a mixture that an engine took, out of its answer.

SGLang sends them as int32 in base64, token after token (0.5.23, srt/state_capturer/routed_experts.py:166): 66 MB for a
response of 32,000 tokens of 48 layers with 8 experts a token, nearly all of the answer. They are taken out of the bytes
before these are parsed, a piece at a time, so that neither their text nor int32 numbers are ever held whole.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_core.errors import EngineError

Routes = NDArray[np.int8 | np.int16]

FIELD = "routed_experts"
_START = re.compile(rb'"routed_experts":\s*"')
# No string of JSON can hold these bytes: quotes in it have a backslash before them.

PIECE = 2**20
"""Characters of base64 decoded at once; a multiple of 16, which are three int32."""


def take_routes(content: bytes) -> tuple[bytes, list[Routes]]:
    """JSON without its routes, each of which is replaced by its place in the list; and these, flat.

    Raises:
        ValueError: they are no int32 numbers in base64.
    """
    rest: list[bytes] = []
    found: list[Routes] = []
    end = 0
    for start in _START.finditer(content):
        last = content.index(b'"', start.end())
        rest += [content[end : start.end() - 1], str(len(found)).encode()]
        found.append(_narrow(memoryview(content)[start.end() : last]))
        end = last + 1
    return (b"".join([*rest, content[end:]]), found) if found else (content, found)


def put_back(meta: Mapping[str, Any], found: list[Routes]) -> Mapping[str, Any]:
    """The ``meta_info`` of a response, with its routes in place of their number."""
    place = meta.get(FIELD)
    return {**meta, FIELD: found[place]} if isinstance(place, int) and 0 <= place < len(found) else meta


def _narrow(text: memoryview) -> Routes:
    size, padding = len(text) // 4 * 3, bytes(text[-2:]).count(b"=")
    count, rest = divmod(size - padding, 4)
    if rest:
        raise ValueError(f"{size - padding} bytes of routes are no int32 numbers")
    routes: Routes = np.empty(count, np.int8)
    done = 0
    for start in range(0, len(text), PIECE):
        numbers = np.frombuffer(binascii.a2b_base64(text[start : start + PIECE], strict_mode=True), np.int32)
        if routes.dtype == np.int8 and numbers.max(initial=0) > np.iinfo(np.int8).max:
            routes = routes.astype(np.int16)
        routes[done : done + numbers.size] = numbers
        done += numbers.size
    return routes


def shaped(meta: Mapping[str, Any], layers: int, experts: int) -> Routes:
    """The routes of a response, [tokens, layers, experts a token].

    Raises:
        EngineError: there are none, or they are of another model.
    """
    flat = meta.get(FIELD)
    if flat is None:
        raise EngineError(
            "The engine sent no routed experts, which the request needs; it must run with "
            "--enable-return-routed-experts, as the engines of a run with --use-rollout-routing-replay do"
        )
    if flat.size % (layers * experts):
        raise EngineError(
            f"The engine sent {flat.size} numbers of experts, which are no multiple of {layers} layers x {experts} "
            "experts a token; does it serve the model of the run?"
        )
    routes: Routes = flat.reshape(-1, layers, experts)
    return routes
