"""Nodes and actors whose plugins are not the driver's, on real Ray."""

from __future__ import annotations

import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

from slime_core.errors import ConfigError, ManifestMismatch, WaitTimeout
from slime_core.plugins.activation import activate
from slime_core.plugins.manifest import Manifest
from slime_core.rollout.actor import SamplerActor
from slime_core.runtime import session
from slime_core.runtime.actors import Launch, start_actor
from slime_core.runtime.session import Session, inspect_nodes, require_inputs
from slime_core.runtime.waiting import wait

HOOKS = """
from slime_core import Component, hookimpl
@hookimpl
def slime_register_reward_models():
    yield Component("length", target="acme_toy.code:Length")
"""
Site = Callable[..., Path]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Makes folders with distribution acme-toy; the first one is on this process's path."""

    def make(name: str, *, version: str = "1.0", code: str = "class Length: pass\n") -> Path:
        folder = tmp_path / name
        info = folder / f"acme_toy-{version}.dist-info"
        for path in (info, folder / "acme_toy"):
            path.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: acme-toy\nVersion: {version}\n")
        (info / "entry_points.txt").write_text("[slime]\ntoy = acme_toy.plugin\n")
        (folder / "acme_toy" / "plugin.py").write_text(HOOKS)
        (folder / "acme_toy" / "__init__.py").touch()
        (folder / "acme_toy" / "code.py").write_text(code)
        return folder

    monkeypatch.syspath_prepend(make("driver"))
    yield make
    for module in [name for name in sys.modules if name.startswith("acme_toy")]:
        del sys.modules[module]


def refusal_of_an_actor(manifest: Manifest, folder: Path) -> str:
    """What a sampler says that has ``folder`` on its path."""
    actor = start_actor(Launch("sampler", env={"PYTHONPATH": str(folder)}), SamplerActor, manifest)
    try:
        with pytest.raises(ManifestMismatch) as failure:
            wait([actor.start(SamplerActor.setup, None)], what="the sampler")  # type: ignore[arg-type]
        return str(failure.value)
    finally:
        ray.kill(actor.handle)


def test_a_node_with_the_drivers_plugins_passes(ray_session: Session) -> None:
    inspect_nodes(activate(["grpo"]).manifest)


def test_a_node_without_a_plugin_is_refused_with_its_name(ray_session: Session, site: Site) -> None:
    with pytest.raises(ManifestMismatch) as failure:
        inspect_nodes(activate(["toy"]).manifest)
    lines = str(failure.value).splitlines()
    assert lines[0].startswith("1 of 1 nodes ")
    assert lines[2].split()[0] == socket.gethostname()
    assert (lines[2].split()[-1], len(lines)) == ("missing", 4)


def test_a_node_without_what_the_run_reads_is_named(ray_session: Session, tmp_path: Path) -> None:
    full, empty, absent = tmp_path / "full", tmp_path / "empty", tmp_path / "absent"
    empty.mkdir()
    full.mkdir()
    (full / "config.json").touch()
    here = {node["NodeID"] for node in ray.nodes()}
    require_inputs(here, [full, full / "config.json", full / "*.json@[0:5]"])
    require_inputs(set(), [absent])
    with pytest.raises(ConfigError) as failure:
        require_inputs(here, [full, empty, absent, full / "train.jsonl"])
    _, *lines, _ = str(failure.value).splitlines()
    node = f"  node {socket.gethostname()} (127.0.0.1): "
    assert lines == [f"{node}{path}" for path in (empty, absent, full / "train.jsonl")]


def test_an_actor_refuses_another_version_and_names_its_node(ray_session: Session, site: Site) -> None:
    manifest = activate(["toy"]).manifest
    message = refusal_of_an_actor(manifest, site("other", version="2.0"))
    content = manifest.entries[1].digest[:12]
    row = message.splitlines()[2].split()
    assert row == [socket.gethostname(), "toy", "acme-toy", "1.0", content, "acme-toy", "2.0", content, "version"]


def test_an_actor_refuses_another_content_of_the_same_version(ray_session: Session, site: Site) -> None:
    manifest = activate(["toy"]).manifest
    message = refusal_of_an_actor(manifest, site("other", code="class Length: changed = True\n"))
    assert message.splitlines()[2].endswith(" acme_toy/code.py")


def test_an_actor_with_the_same_files_elsewhere_attaches(ray_session: Session, site: Site, tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "driver", tmp_path / "copy")
    manifest = activate(["toy"]).manifest
    attached = ray.remote(num_cpus=0, runtime_env={"env_vars": {"PYTHONPATH": str(tmp_path / "copy")}})(_names)
    assert ray.get(attached.remote(manifest)) == ["core", "toy"]


def test_a_node_that_does_not_answer_is_named_with_the_limit(
    ray_session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_differences", _hang)
    with pytest.raises(WaitTimeout, match=rf"^1 of 1 nodes .* 0 s: {socket.gethostname()} \(127\.0\.0\.1\)"):
        inspect_nodes(activate([]).manifest, limit_s=0)


def _hang(manifest: Manifest) -> None:
    time.sleep(600)


def _names(manifest: Manifest) -> list[str]:
    from slime_core.plugins.manifest import attach

    return [plugin.name for plugin in attach(manifest).plugins]


ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import test files
