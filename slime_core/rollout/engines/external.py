"""External engines: the user started them, and names them with ``--rollout-external-engine-addrs``.

    discover         compares what they report with what the run needs, before it starts any process
    ExternalWatcher  polls them during the run: one that is gone, or that another run has updated, ends the run

Weights are published to them as to the run's own engines. They keep running after the run, with its last weights.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slime_core.config.engines import WorkerType
from slime_core.config.model_config import described, differences
from slime_core.config.schema import RunConfig
from slime_core.config.secrets import send_key_to
from slime_core.errors import ConfigError, EngineError, WeightSyncError
from slime_core.rollout.engines.engine import Worker
from slime_core.rollout.engines.server import HANG_LIMIT_S, PROBE_INTERVAL_S, is_hung
from slime_core.runtime.actors import Actor, Launch, Watched, control, start_actor
from slime_core.weights.engine_control import call

ANSWER_LIMIT_S = 30.0
DTYPES = {"half": "float16", "float": "float32"}
"""Other names that SGLang's --dtype has for a type."""

START_IT = "Start the server there first, or correct the address in the table of the set."

REPORTED: Mapping[str, type] = {
    **{"model_path": str, "dtype": str, "disaggregation_mode": str},
    **{"tp_size": int, "pp_size": int, "disaggregation_bootstrap_port": int},
}
"""Fields of an engine's answers and their types; only the model's path is required."""


def discover(addresses: Sequence[str], config: RunConfig, model: Path) -> list[Worker]:
    """The engines at ``addresses`` (``host:port``), in that order.

    Arguments:
        config: settings of the run.
        model: Hugging Face folder of the policy.

    Raises:
        ConfigError: lists every engine that does not answer or cannot serve the run, with all its reasons.
    """
    urls = [f"http://{address}" for address in addresses]
    send_key_to(*urls)
    with ThreadPoolExecutor(len(urls)) as threads:
        answers = list(threads.map(_reported, urls))
    wrong = [
        f"  {url}: {reason}"
        for url, answer in zip(urls, answers, strict=True)
        for reason in ([answer] if isinstance(answer, str) else _reasons(answer, config, model))
    ]
    found = [_worker(url, answer) for url, answer in zip(urls, answers, strict=True) if not isinstance(answer, str)]
    if len({one.worker_type == "regular" for one in found}) > 1:
        wrong.append("  some compute whole requests and others only prefill or decode; give engines of one kind")
    if wrong:
        raise ConfigError("\n".join(["rollout_external_engine_addrs: these engines cannot serve the run:", *wrong]))
    return found


def require_reachable(servers: Mapping[str, str]) -> None:
    """Return if a server accepts connections at every address; sends no request.

    Arguments:
        servers: evaluation set -> URL of the server that answers it.

    Raises:
        ConfigError: lists every set whose server does not.
    """
    with ThreadPoolExecutor(max(1, len(servers))) as threads:
        reasons = list(threads.map(_connection_error, servers.values()))
    wrong = [
        f"  evaluation set {name}: model = {url}: {reason}"
        for (name, url), reason in zip(servers.items(), reasons, strict=True)
        if reason
    ]
    if wrong:
        raise ConfigError("\n".join(["no server answers these evaluation sets:", *wrong, START_IT]))


def _connection_error(url: str) -> str:
    """Why no connection can be made; empty: it can."""
    address = urlsplit(url)
    port = {"http": http.client.HTTP_PORT, "https": http.client.HTTPS_PORT}[address.scheme]
    try:
        socket.create_connection((address.hostname or "", address.port or port), ANSWER_LIMIT_S).close()
    except (OSError, ValueError) as error:  # ValueError: a port above 65535
        return f"{type(error).__name__}: {error}"
    return ""


def _reported(url: str) -> Mapping[str, Any] | str:
    """The engine's own report; a text instead says why there is none."""
    ask = partial(call, url, timeout_s=ANSWER_LIMIT_S)
    try:
        reported, model = ask("/server_info"), ask("/model_info")
    except WeightSyncError as error:
        return f"it does not answer as an SGLang server: {error}"
    if not (isinstance(reported, dict) and isinstance(model, dict)):
        return "it does not answer as an SGLang server: /server_info is no JSON object"
    found = {**reported, **model}
    wrong = [name for name, kind in REPORTED.items() if not isinstance(found.get(name) or kind(), kind)]
    if wrong or not found.get("model_path"):
        names = ", ".join(wrong or ["model_path"])
        return f"it does not answer as an SGLang server: it reports no valid {names}"
    return found


def _worker(url: str, reported: Mapping[str, Any]) -> Worker:
    mode = str(reported.get("disaggregation_mode") or "null")
    kind: WorkerType = "prefill" if mode == "prefill" else "decode" if mode == "decode" else "regular"
    port = int(reported.get("disaggregation_bootstrap_port") or 0) if kind == "prefill" else 0
    return Worker(url, kind, port, ranks=int(reported.get("tp_size") or 1))


def _reasons(reported: Mapping[str, Any], config: RunConfig, model: Path) -> list[str]:
    """Why an engine that reports this cannot serve the run; empty: it can."""
    found = _other_model(reported, model)
    ranks, needed = int(reported.get("tp_size") or 1), config.cluster.rollout_num_gpus_per_engine
    if ranks != needed:
        found.append(
            f"tp_size = {ranks}, but rollout_num_gpus_per_engine = {needed}; start it with --tp-size {needed}, or "
            f"write --rollout-num-gpus-per-engine {ranks}"
        )
    if int(reported.get("pp_size") or 1) != 1:
        found.append(f"pp_size = {reported['pp_size']}; engines that span pipeline stages cannot be updated yet")
    dtype, ours = _dtype(reported), "bfloat16" if config.model.bf16 else "float32"
    if dtype != ours:
        found.append(
            f"dtype = {dtype}, but the learner computes in {ours}; start it with --dtype {ours}, or "
            f"{'leave --bf16 out' if config.model.bf16 else 'write --bf16 if it is bfloat16'}"
        )
    if reported.get("is_generation") is False:
        found.append("it serves embeddings; start it without --is-embedding")
    if config.learner.use_rollout_routing_replay and not reported.get("enable_return_routed_experts"):
        found.append("use_rollout_routing_replay needs the routes; start it with --enable-return-routed-experts")
    if config.rollout.pause_generation_mode == "in_place" and not reported.get("disable_radix_cache"):
        found.append(
            "pause_generation_mode = in_place: its prefix cache would hold entries of older weights; start it with "
            "--disable-radix-cache"
        )
    return found


def _other_model(reported: Mapping[str, Any], model: Path) -> list[str]:
    path, ours = Path(str(reported.get("model_path", ""))), described(model) or {}
    theirs = described(path)
    if theirs is not None:
        different = differences(theirs, ours)
    else:
        listed = {"architectures": reported.get("architectures"), "model_type": reported.get("model_type")}
        different = differences({name: value for name, value in listed.items() if value is not None}, ours)
    if different:
        return [f"its model {path} is not that of {model}: {', '.join(different)}"]
    if theirs is None and path != model:
        return [
            f"its model {path} cannot be read here, so its sizes cannot be compared with those of {model}; "
            "start it from a folder that this machine sees under the same path"
        ]
    return []


def _dtype(reported: Mapping[str, Any]) -> str:
    """The dtype in which it computes; ``auto`` is that of the checkpoint, and half precision where that is float32
    (sglang 0.5.23, srt/configs/model_config.py, ``_get_and_verify_dtype``)."""
    requested = str(reported.get("dtype") or "auto")
    if requested != "auto":
        return DTYPES.get(requested, requested)
    content = described(Path(str(reported.get("model_path", "")))) or {}
    stored = str(content.get("dtype") or content.get("torch_dtype") or "float32")
    return "float16" if stored == "float32" else stored


POLL_INTERVAL_S = 1.0

POLL_LIMIT_S = 10.0
"""Limit of one poll of an engine."""

REFUSALS = 3
"""Polls in a row without a connection after which an engine counts as gone."""


class ExternalWatcher(Watched):
    """The actor that polls the engines at ``urls`` until one of them fails, and remembers their versions."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = list(urls)
        send_key_to(*urls)
        self._refused: Counter[str] = Counter()
        self._versions: dict[str, str] = {}
        self._updated: set[str] = set()
        """Engines to which this run has published."""
        self._hung: list[str] = []

    @control
    def watch(self) -> None:
        """Never returns; its error ends the waits of the run.

        Raises:
            EngineError: as :meth:`poll`.
        """
        for url in self._urls:  # each in a thread, because a request waits as long as the engine is busy
            threading.Thread(target=self.watch_answers, args=(url,), name=f"answers of {url}", daemon=True).start()
        while True:
            self.poll()
            time.sleep(POLL_INTERVAL_S)

    def poll(self) -> None:
        """Return if all of them answer and hold weights of this run. A slow one is left to the limits of requests.

        Raises:
            EngineError: one refused connections several times in a row, hangs, or holds older weights than before.
        """
        for url in self._hung:
            raise EngineError(
                f"The engine at {url}, an external one, runs, but its scheduler has answered nothing for "
                f"{HANG_LIMIT_S:g} s, so it hangs. Restart it, and continue from the last checkpoint with --load"
            )
        for url in self._urls:
            try:
                reported = call(url, "/model_info", timeout_s=POLL_LIMIT_S)
            except WeightSyncError as error:
                self._missed(url, error)
            else:
                self._refused[url] = 0
                self._compare(url, str(reported.get("weight_version", "") if isinstance(reported, dict) else ""))

    def watch_answers(self, url: str, *, limit_s: float = HANG_LIMIT_S) -> None:
        """Return when the engine at ``url`` hangs; then :meth:`poll` raises."""
        while not is_hung(url, limit_s=limit_s):
            time.sleep(PROBE_INTERVAL_S)
        self._hung.append(url)

    def _missed(self, url: str, error: WeightSyncError) -> None:
        is_refused = isinstance(error.__cause__, ConnectionError)
        self._refused[url] = self._refused[url] + 1 if is_refused else 0
        if self._refused[url] >= REFUSALS:
            raise EngineError(
                f"The engine at {url}, an external one, is gone: {error.__cause__!r}. Start it again, or "
                "name others with --rollout-external-engine-addrs, and continue from the last checkpoint with --load"
            )

    def _compare(self, url: str, version: str) -> None:
        """The first change is this run's own: before it, an engine may hold the last version of an earlier run."""
        before = self._versions.setdefault(url, version)
        if version == before:
            return
        if url in self._updated and (not version.isdecimal() or int(version) < int(before)):
            raise EngineError(
                f"The engine at {url}, an external one, held weights of version {before} and now "
                f"holds version {version!r}: it was restarted, or another run publishes to it. What it samples is not "
                "from this run's policy. Stop the other run, and continue from the last checkpoint with --load"
            )
        self._updated.add(url)
        self._versions[url] = version


def start_watch(urls: Sequence[str]) -> Actor[ExternalWatcher]:
    """Start the actor; call :meth:`ExternalWatcher.watch` on it."""
    return start_actor(Launch("external engine watcher"), ExternalWatcher, list(urls))
