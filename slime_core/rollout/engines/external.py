"""Engines that somebody else started: what they say of themselves against what the run needs of them.

They are asked before any server or learner of the run is started. Weights are published to them as to the run's own;
at the end of the run they go on, with the last weights that they were given.
"""

from __future__ import annotations

import http.client
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slime_core.config.described import described, differences
from slime_core.config.schema import RunConfig
from slime_core.config.serving import WorkerType
from slime_core.errors import ConfigError, WeightSyncError
from slime_core.weights.endpoints import call

__all__ = ["External", "Needs", "discover", "refuse_silent"]

ANSWER_LIMIT_S = 30.0
DTYPES = {"half": "float16", "float": "float32"}
"""Other names that SGLang's --dtype has for a type."""

START_IT = "Start the server there first, or correct the address in the table of the set."

TOLD: Mapping[str, type] = {
    **{"model_path": str, "dtype": str, "disaggregation_mode": str},
    **{"tp_size": int, "pp_size": int, "disaggregation_bootstrap_port": int},
}
"""What is read of an engine's answers, and its type; only a model's path has to be there."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What an engine must be for this run.

    Arguments:
        model: Hugging Face folder of the policy.
        dtype: what learner and engines compute in.
        ranks: processes of one engine.
        routes: whether it must return the routes of a mixture.
        pauses_in_place: whether requests go on with new weights from what older ones computed, which others must not
            find in the engine's cache then.
    """

    model: Path
    dtype: str
    ranks: int
    routes: bool = False
    pauses_in_place: bool = False

    @classmethod
    def of(cls, config: RunConfig, model: Path) -> Needs:
        """What the settings ask for."""
        dtype, size = "bfloat16" if config.model.bf16 else "float32", config.cluster.rollout_num_gpus_per_engine
        return cls(
            model,
            dtype,
            size,
            routes=config.learner.use_rollout_routing_replay,
            pauses_in_place=config.rollout.pause_generation_mode == "in_place",
        )


@dataclass(frozen=True, slots=True)
class External:
    """An engine that somebody else started and that can serve the run.

    Arguments:
        url: its address.
        ranks: its processes.
        worker_type: what it does of a request.
        bootstrap_port: of a prefill engine; 0: it is none.
    """

    url: str
    ranks: int
    worker_type: WorkerType = "regular"
    bootstrap_port: int = 0


def discover(addresses: Sequence[str], needs: Needs) -> list[External]:
    """The engines at ``addresses`` (``host:port``), in that order.

    Raises:
        ConfigError: lists every engine that does not answer or cannot serve the run, with all its reasons.
    """
    urls = [f"http://{address}" for address in addresses]
    with ThreadPoolExecutor(len(urls)) as threads:
        answers = list(threads.map(_asked, urls))
    wrong = [
        f"  {url}: {reason}"
        for url, answer in zip(urls, answers, strict=True)
        for reason in ([answer] if isinstance(answer, str) else _reasons(answer, needs))
    ]
    found = [_external(url, answer) for url, answer in zip(urls, answers, strict=True) if not isinstance(answer, str)]
    if len({one.worker_type == "regular" for one in found}) > 1:
        wrong.append("  some do whole requests and others only prefill or decode; give engines of one kind")
    if wrong:
        raise ConfigError("\n".join(["rollout_external_engine_addrs: these engines cannot serve the run:", *wrong]))
    return found


def refuse_silent(answerers: Mapping[str, str]) -> None:
    """Returns if somebody takes connections at every address; nothing is asked.

    Arguments:
        answerers: evaluation set -> address of the server that answers it.

    Raises:
        ConfigError: lists every set whose server does not.
    """
    with ThreadPoolExecutor(max(1, len(answerers))) as threads:
        reasons = list(threads.map(_silence, answerers.values()))
    wrong = [
        f"  evaluation set {name}: model = {url}: {reason}"
        for (name, url), reason in zip(answerers.items(), reasons, strict=True)
        if reason
    ]
    if wrong:
        raise ConfigError("\n".join(["these evaluations have nobody who answers them:", *wrong, START_IT]))


def _silence(url: str) -> str:
    """Why no connection can be made; empty: one can."""
    address = urlsplit(url)
    port = {"http": http.client.HTTP_PORT, "https": http.client.HTTPS_PORT}[address.scheme]
    try:
        socket.create_connection((address.hostname or "", address.port or port), ANSWER_LIMIT_S).close()
    except (OSError, ValueError) as error:  # ValueError: a port above 65535
        return f"{type(error).__name__}: {error}"
    return ""


def _asked(url: str) -> Mapping[str, Any] | str:
    """What the engine says of itself; text: why it says nothing."""
    ask = partial(call, url, timeout_s=ANSWER_LIMIT_S)
    try:
        told, model = ask("/server_info"), ask("/model_info")
    except WeightSyncError as error:
        return f"it does not answer as an SGLang server: {error}"
    if not (isinstance(told, dict) and isinstance(model, dict)):
        return "it does not answer as an SGLang server: /server_info is no JSON object"
    found = {**told, **model}
    wrong = [name for name, kind in TOLD.items() if not isinstance(found.get(name) or kind(), kind)]
    if wrong or not found.get("model_path"):
        names = ", ".join(wrong or ["model_path"])
        return f"it does not answer as an SGLang server: what it says of {names} is missing or wrong"
    return found


def _external(url: str, told: Mapping[str, Any]) -> External:
    mode = str(told.get("disaggregation_mode") or "null")
    kind: WorkerType = "prefill" if mode == "prefill" else "decode" if mode == "decode" else "regular"
    port = int(told.get("disaggregation_bootstrap_port") or 0) if kind == "prefill" else 0
    return External(url, int(told.get("tp_size") or 1), kind, port)


def _reasons(told: Mapping[str, Any], needs: Needs) -> list[str]:
    """Why an engine that says this cannot serve the run; empty: it can."""
    found = _other_model(told, needs)
    ranks = int(told.get("tp_size") or 1)
    if ranks != needs.ranks:
        found.append(
            f"tp_size = {ranks}, but rollout_num_gpus_per_engine = {needs.ranks}; start it with --tp-size "
            f"{needs.ranks}, or write --rollout-num-gpus-per-engine {ranks}"
        )
    if int(told.get("pp_size") or 1) != 1:
        found.append(f"pp_size = {told['pp_size']}; engines that span pipeline stages cannot be updated yet")
    dtype = _dtype(told)
    if dtype != needs.dtype:
        found.append(
            f"dtype = {dtype}, but the learner computes in {needs.dtype}; start it with --dtype {needs.dtype}, or "
            f"{'leave --bf16 out' if needs.dtype == 'bfloat16' else 'write --bf16 if it is bfloat16'}"
        )
    if told.get("is_generation") is False:
        found.append("it serves embeddings; start it without --is-embedding")
    if needs.routes and not told.get("enable_return_routed_experts"):
        found.append("use_rollout_routing_replay needs the routes; start it with --enable-return-routed-experts")
    if needs.pauses_in_place and not told.get("disable_radix_cache"):
        found.append("pause_generation_mode = in_place: its cache would outlive weights; add --disable-radix-cache")
    return found


def _other_model(told: Mapping[str, Any], needs: Needs) -> list[str]:
    path, ours = Path(str(told.get("model_path", ""))), described(needs.model) or {}
    theirs = described(path)
    if theirs is not None:
        different = differences(theirs, ours)
    else:
        listed = {"architectures": told.get("architectures"), "model_type": told.get("model_type")}
        different = differences({name: value for name, value in listed.items() if value is not None}, ours)
    if different:
        return [f"its model {path} is not that of {needs.model}: {', '.join(different)}"]
    if theirs is None and path != needs.model:
        return [
            f"its model {path} cannot be read here, so nobody can say whether its sizes are those of {needs.model}; "
            "start it from a folder that this machine sees under the same path"
        ]
    return []


def _dtype(told: Mapping[str, Any]) -> str:
    """What it computes in; ``auto`` is what the checkpoint says, and half precision where that is float32 (sglang
    0.5.23, srt/configs/model_config.py, ``_get_and_verify_dtype``)."""
    asked = str(told.get("dtype") or "auto")
    if asked != "auto":
        return DTYPES.get(asked, asked)
    content = described(Path(str(told.get("model_path", "")))) or {}
    stored = str(content.get("dtype") or content.get("torch_dtype") or "float32")
    return "float16" if stored == "float32" else stored
