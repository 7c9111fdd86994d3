"""External engines: the user started them, and names them with ``--rollout-external-engine-addrs``.

    discover         compares their reports with the needs of the run, before the run starts any process
    ExternalWatcher  polls them during the run: an engine that is gone, or that another run has updated, ends the run
    require_eval_servers_reachable  checks the external servers that evaluation sets name (``model = URL``)

:mod:`.fleet` calls all three. External engines get weights like the engines that the run starts. They keep running
after the run, with its last weights.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, ValidationError

from slime_core.config.engines import WorkerType
from slime_core.config.model_config import described, differences, weights_dtype
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


class EngineReport(BaseModel, protected_namespaces=()):
    """The fields of ``/server_info`` and ``/model_info`` that a run needs."""

    model_path: str = Field(min_length=1)
    architectures: list[str] | None = None
    model_type: str | None = None
    dtype: str = "auto"
    tp_size: int = 1
    pp_size: int = 1
    disaggregation_mode: Literal["null", "prefill", "decode"] = "null"
    disaggregation_bootstrap_port: int | None = None
    is_generation: bool = True
    enable_return_routed_experts: bool = False
    enable_fp32_lm_head: bool = False
    disable_radix_cache: bool = False


def discover(addresses: Sequence[str], config: RunConfig, model: Path) -> list[Worker]:
    """Return the engines at ``addresses`` (``host:port``), in that order.

    Arguments:
        config: settings of the run.
        model: Hugging Face folder of the policy.

    Raises:
        ConfigError: lists every engine that does not answer or cannot serve the run, with all its reasons.
    """
    urls = [f"http://{address}" for address in addresses]
    send_key_to(*urls)
    with ThreadPoolExecutor(len(urls)) as threads:
        reports = list(threads.map(_report, urls))
    problems = [
        f"  {url}: {reason}"
        for url, report in zip(urls, reports, strict=True)
        for reason in ([report] if isinstance(report, str) else _reasons(report, config, model))
    ]
    workers = [_worker(url, report) for url, report in zip(urls, reports, strict=True) if not isinstance(report, str)]
    if len({worker.worker_type == "regular" for worker in workers}) > 1:
        problems.append("  some compute whole requests and others only prefill or decode; give engines of one kind")
    if problems:
        raise ConfigError("\n".join(["rollout_external_engine_addrs: these engines cannot serve the run:", *problems]))
    return workers


def require_eval_servers_reachable(servers: Mapping[str, str]) -> None:
    """Check that the server of every evaluation set accepts connections; send no request.

    Arguments:
        servers: evaluation set -> URL of its server.

    Raises:
        ConfigError: a server cannot be reached; lists all such sets.
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
    """Return why no connection to ``url`` can be made; empty: it can."""
    address = urlsplit(url)
    port = {"http": http.client.HTTP_PORT, "https": http.client.HTTPS_PORT}[address.scheme]
    try:
        socket.create_connection((address.hostname or "", address.port or port), ANSWER_LIMIT_S).close()
    except (OSError, ValueError) as error:  # ValueError: a port above 65535
        return f"{type(error).__name__}: {error}"
    return ""


def _report(url: str) -> EngineReport | str:
    """Return the engine's report, or a text with the reason why it has none."""
    problem = "it does not answer as an SGLang server"
    try:
        fields: dict[str, Any] = {}
        # Last the settings of its start: /model_info names the folder of the last update, which may be gone.
        for path in ("/model_info", "/server_info"):
            fields |= call(url, path, timeout_s=ANSWER_LIMIT_S)
        return EngineReport.model_validate(fields)
    except WeightSyncError as error:
        return f"{problem}: {error}"
    except ValidationError as error:
        names = dict.fromkeys(str(mistake["loc"][0]) for mistake in error.errors())
        return f"{problem}: it reports no valid {', '.join(names)}"
    except (TypeError, ValueError):
        return f"{problem}: /server_info is not a JSON object"


def _worker(url: str, report: EngineReport) -> Worker:
    kind: WorkerType = "regular" if report.disaggregation_mode == "null" else report.disaggregation_mode
    port = report.disaggregation_bootstrap_port if kind == "prefill" else None
    return Worker(url, kind, port or 0, ranks=report.tp_size)


def _reasons(report: EngineReport, config: RunConfig, model: Path) -> list[str]:
    """Return the reasons why an engine with this report cannot serve the run."""
    reasons = _other_model(report, model)
    ranks, needed = report.tp_size, config.cluster.rollout_num_gpus_per_engine
    if ranks != needed:
        reasons.append(
            f"tp_size = {ranks}, but rollout_num_gpus_per_engine = {needed}; start it with --tp-size {needed}, or "
            f"write --rollout-num-gpus-per-engine {ranks}"
        )
    if report.pp_size != 1:
        reasons.append(f"pp_size = {report.pp_size}; engines that span pipeline stages cannot be updated yet")
    dtype, expected = _dtype(report), "bfloat16" if config.model.bf16 else "float32"
    if dtype != expected:
        reasons.append(
            f"dtype = {dtype}, but the learner computes in {expected}; start it with --dtype {expected}, or "
            f"{'leave --bf16 out' if config.model.bf16 else 'write --bf16 if it is bfloat16'}"
        )
    if not report.is_generation:
        reasons.append("it serves embeddings; start it without --is-embedding")
    if config.learner.use_rollout_routing_replay and not report.enable_return_routed_experts:
        reasons.append("use_rollout_routing_replay needs the routes; start it with --enable-return-routed-experts")
    if report.enable_fp32_lm_head != config.learner.fp32_lm_head:
        preposition = "with" if config.learner.fp32_lm_head else "without"
        reasons.append(
            f"enable_fp32_lm_head = {report.enable_fp32_lm_head}, but fp32_lm_head = {config.learner.fp32_lm_head}; "
            f"start it {preposition} --enable-fp32-lm-head"
        )
    if config.rollout.pause_generation_mode == "in_place" and not report.disable_radix_cache:
        reasons.append(
            "pause_generation_mode = in_place: its prefix cache would hold entries of older weights; start it with "
            "--disable-radix-cache"
        )
    return reasons


def _other_model(report: EngineReport, model: Path) -> list[str]:
    path, expected = Path(report.model_path), described(model) or {}
    reported = described(path)
    stated = report.model_dump(include={"architectures", "model_type"}, exclude_none=True)
    if different := differences(reported or stated, expected):
        return [f"its model {path} is not that of {model}: {', '.join(different)}"]
    if reported is None and path != model:
        return [
            f"its model {path} cannot be read here, so its sizes cannot be compared with those of {model}; "
            "start it from a folder that this machine sees under the same path"
        ]
    return []


def _dtype(report: EngineReport) -> str:
    """Return the dtype in which it computes; ``auto`` is that of the checkpoint, or half precision for float32 (sglang
    0.5.23, srt/configs/model_config.py, ``_get_and_verify_dtype``)."""
    if report.dtype != "auto":
        return DTYPES.get(report.dtype, report.dtype)
    stored = weights_dtype(Path(report.model_path)) or "float32"
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
        """Poll until an engine fails; the error ends the waits of the run.

        Raises:
            EngineError: as :meth:`poll`.
        """
        for url in self._urls:  # each in a thread, because a request waits as long as the engine is busy
            threading.Thread(target=self.watch_answers, args=(url,), name=f"answers of {url}", daemon=True).start()
        while True:
            self.poll()
            time.sleep(POLL_INTERVAL_S)

    def poll(self) -> None:
        """Check that all engines answer and hold weights of this run. A slow engine is not an error here: requests
        have limits.

        Raises:
            EngineError: an engine refused connections several times in a row, hangs, or holds older weights than
                before.
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
        """Wait until the engine at ``url`` hangs, and record it; :meth:`poll` then raises."""
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
        """Accept the first change, which this run made: before it, an engine may hold the version of an earlier run."""
        before = self._versions.setdefault(url, version)
        if version == before:
            return
        if url in self._updated and (not version.isdecimal() or int(version) < int(before)):
            raise EngineError(
                f"The engine at {url}, an external one, held weights of version {before} and now "
                f"holds version {version!r}: it was restarted, or another run publishes to it. Its samples are not "
                "from this run's policy. Stop the other run, and continue from the last checkpoint with --load"
            )
        self._updated.add(url)
        self._versions[url] = version


def start_watch(urls: Sequence[str]) -> Actor[ExternalWatcher]:
    """Start the actor; call :meth:`ExternalWatcher.watch` on it."""
    return start_actor(Launch("external engine watcher"), ExternalWatcher, list(urls))
