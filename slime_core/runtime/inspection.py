"""Compares the plugins of every node with the driver's before anything is loaded, and reports all differences in one
table.

Actors refuse plugins that differ from the driver's, but one actor at a time, and only when it starts: after engines
have loaded their weights. Here one task a node, in a worker process like theirs, attaches the manifest and reports.

Only the nodes of a joined cluster are inspected. The node of a run's own cluster is the driver's machine, environment
and folder: inspecting it would delay every start by a second or two, and its actors compare the manifest as well.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime_core.config.prompt_paths import unreadable
from slime_core.errors import ConfigError, ManifestMismatch, PluginError, SlimeError, WaitTimeout
from slime_core.plugins.manifest import Difference, Manifest, attach, difference_text, mismatches
from slime_core.runtime.actors import Call, Ref
from slime_core.runtime.waiting import wait

LIMIT_S = 120.0
"""Seconds for all nodes together; an idle node takes one or two, most of it the start of a worker process."""


@dataclass(frozen=True, slots=True)
class Report:
    """Differences of one node's plugins from the driver's, or those that it cannot load.

    Arguments:
        differences: from the manifest.
        broken: the error of a plugin that fails while it is imported; empty: none does.
    """

    differences: tuple[Difference, ...] = ()
    broken: str = ""


def inspect_nodes(manifest: Manifest, *, limit_s: float = LIMIT_S) -> None:
    """Returns if every living node of the cluster has exactly the plugins of ``manifest`` and can load them.

    Arguments:
        limit_s: how long to wait for the nodes, all together.

    Raises:
        ManifestMismatch: one table of everything that differs, or that cannot be loaded, on any node.
        WaitTimeout: a node has not answered in time, and no other has reported a difference.
    """
    nodes = labels([node for node in ray.nodes() if node["Alive"]])
    calls = [Call(_look_on(node, manifest), f"node {label}", "attach") for node, label in nodes.items()]
    started_s = time.monotonic()
    reports, silent = {}, []
    for label, call in zip(nodes.values(), calls, strict=True):
        left_s = max(0.0, started_s + limit_s - time.monotonic())
        try:
            reports[label] = wait([call], what="every node to look at its plugins", fail_after_s=left_s)[0]
        except WaitTimeout:
            silent.append(label)
        except SlimeError as failure:  # slime is not installed there, or in another version
            reports[label] = Report(broken=str(failure))
    judge(reports, total=len(nodes))
    if silent:
        raise WaitTimeout(_late(silent, total=len(nodes), limit_s=limit_s))


def _look_on(node: str, manifest: Manifest) -> Ref[Report]:
    task: Any = ray.remote(num_cpus=0, max_retries=0)(_look)
    reference: Ref[Report] = task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
        manifest
    )
    return reference


def _look(manifest: Manifest) -> Report:
    found = mismatches(manifest)
    if found:
        return Report(tuple(found))
    try:
        attach(manifest)
    except PluginError as broken:
        return Report(broken=str(broken))
    return Report()


def require_inputs(node_ids: Collection[str], paths: Sequence[Path], *, limit_s: float = LIMIT_S) -> None:
    """Returns if every node of ``node_ids`` has all ``paths``, in one task a node.

    Raises:
        ConfigError: names every node that lacks one, and what it lacks.
        WaitTimeout: a node has not answered in time.
    """
    nodes = {node: label for node, label in labels(ray.nodes()).items() if node in node_ids}
    calls = [
        Call(_missing_on(node, [str(path) for path in paths]), f"node {label}", "look") for node, label in nodes.items()
    ]
    missing = wait(calls, what="every node to look for what the run reads", fail_after_s=limit_s)
    lines = [f"  node {label}: {path}" for label, paths in zip(nodes.values(), missing, strict=True) for path in paths]
    if lines:
        raise ConfigError(
            "\n".join(
                [
                    f"some of the {len(nodes)} nodes of the run do not have, or have empty, what it reads; nothing "
                    "was started:",
                    *lines,
                    "Copy them there under the same path, or put them on a file system that all nodes share.",
                ]
            )
        )


def _missing_on(node: str, paths: list[str]) -> Ref[list[str]]:
    task: Any = ray.remote(num_cpus=0, max_retries=0)(_missing)
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    reference: Ref[list[str]] = task.options(scheduling_strategy=strategy).remote(paths)
    return reference


def _missing(paths: list[str]) -> list[str]:
    # An empty folder is where a shared file system was not mounted.
    found = {path: Path(path) for path in paths}
    return [path for path, one in found.items() if not (any(one.iterdir()) if one.is_dir() else _is_readable(one))]


def _is_readable(prompts: Path) -> bool:
    return next(unreadable(prompts), None) is None  # a pattern and a slice of rows are prompts too


def labels(nodes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Node id -> its name in messages: host name and address, and the id where two nodes share those."""
    names = {node["NodeID"]: f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})" for node in nodes}
    count = Counter(names.values())
    return {node: name if count[name] == 1 else f"{name} {node[:8]}" for node, name in names.items()}


def judge(reports: Mapping[str, Report], *, total: int) -> None:
    """Returns if no node has reported anything.

    Arguments:
        reports: node -> its report.
        total: nodes of the cluster, those that have not answered included.

    Raises:
        ManifestMismatch: one table of everything that differs, and below it what cannot be loaded.
    """
    differing = {node: report.differences for node, report in reports.items() if report.differences}
    broken = {node: report.broken for node, report in reports.items() if report.broken}
    if not (differing or broken):
        return
    parts = [f"{len(differing) + len(broken)} of {total} nodes cannot run the driver's plugins; nothing was started."]
    parts += [difference_text(differing)] if differing else []
    parts += [f"on node {node}: {failure}" for node, failure in broken.items()]
    raise ManifestMismatch("\n".join(parts))


def _late(silent: Sequence[str], *, total: int, limit_s: float) -> str:
    return (
        f"{len(silent)} of {total} nodes did not report their plugins within {limit_s:g} s: "
        f"{', '.join(silent)}.\n"
        "`ray status` and the logs of Ray on those nodes say why no process of theirs runs; then start again."
    )
