"""Control calls to the inference servers over HTTP: to all engines concurrently, each call with a time limit.

The calls block; a call raises unless all engines answer 200. The publisher (on a learner rank) uses
:class:`EngineControl` for weights, engine actors use it for pauses and memory.
"""

from __future__ import annotations

import http.client
import json
import math
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol
from urllib.parse import urlsplit

from slime_core.config.secrets import engine_headers, key_advice, send_key_to
from slime_core.errors import EngineSilent, WeightSyncError
from slime_core.weights.hugging_face import WeightSpec

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

PauseMode = Literal["abort", "retract", "in_place"]
"""``abort``: requests in flight return the tokens that they have. ``retract``: they are recomputed later, so the cache
can be flushed. ``in_place``: they keep their cache and resume."""

GRACE_S = 1.0
"""Seconds to wait for the other calls after one call has failed."""

ACCEPTED = range(200, 300)
SHA_DIGITS, XXH3_DIGITS = 16, 32
"""Hexadecimal digits of a weight's digest: 8 bytes of SGLang's SHA-256; XXH3 from servers that slime starts on a
CPU."""

BODY_SHOWN = 400
"""Characters of a refusal that an error quotes."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Weights of one dtype that are sent in one message, in this order."""

    specs: tuple[WeightSpec, ...]

    @property
    def names(self) -> list[str]:
        """Hugging Face names."""
        return [spec.name for spec in self.specs]


class Sending(Protocol):
    """A started broadcast, such as ``torch.distributed.Work``."""

    def wait(self) -> Any:
        """Wait until it is done."""


@dataclass(frozen=True, slots=True)
class EngineChecksums:
    """Checksums of one engine's weights: ``ranks[r]`` maps the engine's parameter names to hexadecimal digits.

    The engine fuses parameters (``qkv_proj``, ``gate_up_proj``), so its names differ from Hugging Face names. ``total``
    is the checksum over all ranks.
    """

    url: str
    total: str
    ranks: tuple[Mapping[str, str], ...]

    @property
    def digits(self) -> int:
        """Hexadecimal digits of a digest; the number identifies the hash function."""
        fast = any(len(digest) == XXH3_DIGITS for of_rank in self.ranks for digest in of_rank.values())
        return XXH3_DIGITS if fast else SHA_DIGITS


PROMPT_S = 60.0
"""Limit in seconds of calls that an engine answers after its current forward pass. It detects a hanging scheduler: the
health checks of a paused engine cannot, because loading weights looks the same to them."""


class EngineControl:
    """Controls the servers at ``urls`` (``http://host:port``); every call goes to all of them.

    Arguments:
        urls: all engines, in the order of their ranks in an update group.
        timeout_s: limit of one call.
        ranks_per_engine: processes of one engine that join an update group (its tensor parallel size); one number for
            all engines, or one per engine.

    Attributes:
        ranks: these numbers, one per engine.
    """

    def __init__(
        self, urls: Sequence[str], *, timeout_s: float = 120.0, ranks_per_engine: int | Sequence[int] = 1
    ) -> None:
        if not urls:
            raise WeightSyncError("No engine URL was given")
        self.urls = tuple(url.rstrip("/") for url in urls)
        send_key_to(*self.urls)
        each = [ranks_per_engine] * len(self.urls) if isinstance(ranks_per_engine, int) else ranks_per_engine
        self.ranks = tuple(each)
        self._timeout_s = timeout_s
        self._keeps_cache = False
        # Two calls per engine: a broadcast may still be in transit when the group is torn down.
        self._threads = ThreadPoolExecutor(2 * len(self.urls), thread_name_prefix="engine-control")

    def close(self) -> None:
        """End the threads without waiting for calls in flight."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- Generation --------------------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode = "retract") -> None:
        """Stop generation on all engines; new requests wait until :meth:`resume`.

        Engines that are paused in place keep their cache, and requests in flight resume with it: an update then flushes
        nothing, even if requested. So run them with ``--disable-radix-cache``, or new requests would reuse keys and
        values of old weights.
        """
        self._keeps_cache = mode == "in_place"
        self._all("/pause_generation", {"mode": mode}, limit_s=PROMPT_S)

    def resume(self) -> None:
        """Let all engines generate again and resume the waiting requests."""
        self._all("/continue_generation", {})

    def flush_cache(self) -> None:
        """Drop the keys and values of earlier weights. The engines must be idle, or paused other than in place."""
        self._all(f"/flush_cache?timeout={self._timeout_s / 2:g}", {})

    # --- Updates -----------------------------------------------------------------------------------------------------

    def begin_update(self) -> None:
        """Prepare all engines to accept weights."""
        self._all("/begin_weight_update", {}, limit_s=PROMPT_S)

    def end_update(self, *, limit_s: float = math.inf) -> None:
        """Let all engines post-process the new weights; ``limit_s`` lowers the limit of the call."""
        self._all("/end_weight_update", {}, limit_s=limit_s)

    def init_group(
        self, *, master_address: str, master_port: int, group: str, backend: str, rank_offset: int = 1
    ) -> None:
        """Let every engine join the update group. The first engine takes the ranks from ``rank_offset`` on, the next
        engine the ranks after these.

        Rank 0 has to join concurrently: :class:`slime_core.weights.transports.UpdateGroup` does both.
        """
        common = {
            "master_address": master_address,
            "master_port": master_port,
            "world_size": rank_offset + sum(self.ranks),
            "group_name": group,
            "backend": backend,
        }
        offsets = [rank_offset + before for before in accumulate((0, *self.ranks[:-1]))]
        self._each("/init_weights_update_group", [common | {"rank_offset": offset} for offset in offsets])

    def destroy_group(self, group: str) -> None:
        """Let every engine leave the update group."""
        self._all("/destroy_weights_update_group", {"group_name": group})

    def update_from_distributed(
        self,
        bucket: Bucket,
        *,
        group: str,
        send: Callable[[], Sending],
        version: str | None = None,
    ) -> None:
        """Broadcast ``bucket`` to all engines, and wait until all of them have loaded it.

        Arguments:
            bucket: names, dtypes and shapes of the weights.
            group: name of the update group.
            send: starts the broadcast of the flattened bucket from rank 0 and returns at once.
            version: with the last bucket: the engines report their tokens under this version from now on, and drop keys
                and values unless they are paused in place. None: more buckets follow.

        Raises:
            WeightSyncError: an engine refused or died. The call then does not wait for the broadcast, and the group is
                unusable.
        """
        body = {
            "names": bucket.names,
            "dtypes": [spec.dtype for spec in bucket.specs],
            "shapes": [list(spec.shape) for spec in bucket.specs],
            "group_name": group,
            **self._loading(version),
        }
        calls = self._start("/update_weights_from_distributed", [body] * len(self.urls))
        sending = send()
        self._gather(calls)
        sending.wait()

    def update_from_tensor(self, payloads: Sequence[Sequence[str]], *, version: str | None = None) -> None:
        """Let all engines load a bucket from memory that they share with learner ranks.

        Arguments:
            payloads: for each process of each engine, the pickle that it reads (``transports.py``).
            version: as in :meth:`update_from_distributed`.
        """
        bodies = [self._loading(version) | {"serialized_named_tensors": list(of_engine)} for of_engine in payloads]
        self._each("/update_weights_from_tensor", bodies)

    def _loading(self, version: str | None) -> dict[str, Any]:
        """Return the fields that all calls that load a bucket have."""
        flushes = version is not None and not self._keeps_cache
        body: dict[str, Any] = {"load_format": "flattened_bucket", "flush_cache": flushes}
        return body if version is None else {**body, "weight_version": version}

    def update_from_disk(self, folder: Path, *, version: str) -> None:
        """Let all engines load the Hugging Face folder ``folder``, report ``version`` and, unless they are paused in
        place, flush their cache.

        Needs no :meth:`begin_update`. An engine that finds no weights in the folder refuses and keeps its weights.
        """
        body = {"model_path": str(folder), "weight_version": version, "flush_cache": not self._keeps_cache}
        self._all("/update_weights_from_disk", body)

    def set_version(self, version: str) -> None:
        """Let all engines report their tokens under ``version`` from now on."""
        self._all("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    # --- Memory ------------------------------------------------------------------------------------------------------

    def release_memory(self, *tags: str) -> None:
        """Release the memory of ``tags`` on all engines; releasing the cache drops its entries.

        A server dies, instead of refusing, if it generates meanwhile (sglang 0.5.23,
        srt/managers/scheduler_components/weight_updater.py): the engines must be idle, or paused other than
        in place. On a CPU, and on GPUs without ``--enable-memory-saver``, a server releases nothing and answers 200.

        Arguments:
            tags: ``"kv_cache"``, ``"weights"``, ``"cuda_graph"``; without any, all three.
        """
        self._all("/release_memory_occupation", {"tags": list(tags)})

    def resume_memory(self, *tags: str) -> None:
        """Allocate memory for ``tags`` on all engines again. Its former contents are lost, so publish weights next.

        A server dies, instead of refusing, if one of ``tags`` was not released.

        Arguments:
            tags: as in :meth:`release_memory`.
        """
        self._all("/resume_memory_occupation", {"tags": list(tags)})

    # --- State -------------------------------------------------------------------------------------------------------

    def check_alive(self) -> None:
        """Raise WeightSyncError if an engine does not answer."""
        self._all("/model_info")

    def version(self) -> str:
        """Return the version of the weights that the engines serve.

        Raises:
            WeightSyncError: they serve different versions.
        """
        versions = [answer["weight_version"] for answer in self._all("/model_info")]
        if len(set(versions)) > 1:
            raise WeightSyncError(f"The engines serve different weights: {dict(zip(self.urls, versions, strict=True))}")
        return str(versions[0])

    def checksum(self) -> tuple[EngineChecksums, ...]:
        """Return the checksums of each engine's weights: 4 to 8 ms for a model of 0.5 MB; works while paused."""
        answers = self._all("/weights_checker", {"action": "checksum"})
        return tuple(
            EngineChecksums(url, answer["per_engine_checksum"], tuple(rank["checksums"] for rank in answer["ranks"]))
            for url, answer in zip(self.urls, answers, strict=True)
        )

    def overwrite(self) -> None:
        """Overwrite all weights that :meth:`checksum` reports with random numbers, on all engines."""
        self._all("/weights_checker", {"action": "reset_tensors"})

    # --- Calls -------------------------------------------------------------------------------------------------------

    def _all(self, endpoint: str, body: Mapping[str, Any] | None = None, *, limit_s: float = math.inf) -> list[Any]:
        return self._gather(self._start(endpoint, [body] * len(self.urls), limit_s=limit_s))

    def _each(self, endpoint: str, bodies: Sequence[Mapping[str, Any] | None]) -> list[Any]:
        return self._gather(self._start(endpoint, bodies))

    def _start(
        self, endpoint: str, bodies: Sequence[Mapping[str, Any] | None], *, limit_s: float = math.inf
    ) -> list[Future[Any]]:
        return [
            self._threads.submit(call, url, endpoint, body, timeout_s=min(limit_s, self._timeout_s))
            for url, body in zip(self.urls, bodies, strict=True)
        ]

    def _gather(self, calls: Sequence[Future[Any]]) -> list[Any]:
        # The first failure is the cause; other calls may hang because of it, until their limit. Calls that are only
        # slower get a moment to end, so that they do not overlap with the next call of the caller.
        ended, others = wait(calls, return_when=FIRST_EXCEPTION)
        wait(others, timeout=GRACE_S)
        for ended_call in ended:
            ended_call.result()
        return [each.result() for each in calls]


def call(
    url: str, path: str, body: Mapping[str, Any] | None = None, *, method: str | None = None, timeout_s: float
) -> Any:
    """Call the server at ``url``; return its JSON answer, or the text if it is not JSON. Arguments as :func:`request`.

    Raises:
        EngineSilent: no answer within ``timeout_s`` seconds, or no connection.
        WeightSyncError: the server refused.
    """
    try:
        status, text = request(url, path, body, method=method, timeout_s=timeout_s)
    except (OSError, http.client.HTTPException) as error:
        raise EngineSilent(f"{url}{path} gave no answer (limit {timeout_s:g} s): {error!r}. Is it alive?") from error
    if status not in ACCEPTED:
        refusal = f"{url}{path} refused with status {status}: {text[:BODY_SHOWN]}"
        raise WeightSyncError(" ".join([refusal, *key_advice(status)]))
    try:
        return json.loads(text)
    except ValueError:
        return text


def request(
    url: str, path: str, body: Mapping[str, Any] | None = None, *, method: str | None = None, timeout_s: float
) -> tuple[int, str]:
    """Send a request to ``path`` of the server at ``url``; return status and text of the answer.

    Arguments:
        url: ``http://host:port``.
        body: to send as JSON.
        method: None: GET without a body, POST with one.

    Raises:
        OSError, http.client.HTTPException: no answer within ``timeout_s`` seconds, or no connection.
    """
    # http.client ignores proxy settings: a loopback address must not go through a proxy.
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout_s)
    content = None if body is None else json.dumps(body)
    headers = {"Content-Type": "application/json", **engine_headers(url)}
    try:
        connection.request(method or ("GET" if body is None else "POST"), path, content, headers)
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    finally:
        connection.close()


# --- Rendezvous -------------------------------------------------------------------------------------------------------


_reserved: dict[tuple[str, int], socket.socket] = {}
"""Address and port -> the socket that reserves the port for a later store."""


def reserve_port(address: str) -> int:
    """Reserve a free port of ``address`` until this process, or a fork of it, serves a store there; return the port.

    Raises:
        OSError: ``address`` is not an address of this machine.
    """
    listener = socket.create_server((address, 0), family=_family(address))
    port = int(listener.getsockname()[1])
    _reserved[address, port] = listener
    return port


def serve_store(address: str, *, world_size: int, timeout: timedelta, port: int = 0) -> TCPStore:
    """Serve the rendezvous store of ``world_size`` processes on ``address`` and no other interface; return at once.

    The other processes connect with ``TCPStore(address, store.port, world_size, is_master=False)``.

    Arguments:
        address: IP address of this process as the other processes see it.
        world_size: number of processes, this process included.
        timeout: limit of every later wait in the store.
        port: port to listen on, such as one from :func:`reserve_port`; 0: a free port.

    Raises:
        OSError: ``address`` is not an address of this machine, or the port is taken.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # Without a socket the store listens on all interfaces. It takes over this socket and closes it.
    listener = _reserved.pop((address, port), None) or socket.create_server(
        (address, port), family=_family(address), backlog=world_size
    )
    return TCPStore(
        address,
        listener.getsockname()[1],
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
