"""Nodes and actors that differ from the driver, on real Ray: their plugins, files and GPUs."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import textwrap
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
from tests.nodes import acme_toy, cluster

Site = Callable[..., Path]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Makes folders with distribution acme-toy; the first one is on this process's path."""
    monkeypatch.syspath_prepend(acme_toy(tmp_path / "driver"))
    yield lambda name, **content: acme_toy(tmp_path / name, **content)
    for module in [name for name in sys.modules if name.startswith("acme_toy")]:
        del sys.modules[module]


def refusal_of_an_actor(manifest: Manifest, folder: Path) -> str:
    """The message of a sampler that has ``folder`` on its path."""
    actor = start_actor(Launch("sampler", env={"PYTHONPATH": str(folder)}), SamplerActor, manifest)
    try:
        with pytest.raises(ManifestMismatch) as failure:
            wait([actor.start(SamplerActor.setup, None)], what="the sampler")  # type: ignore[arg-type]
        return str(failure.value)
    finally:
        ray.kill(actor.handle)


def test_a_node_with_the_drivers_plugins_passes_and_one_without_is_named(ray_session: Session, site: Site) -> None:
    inspect_nodes(activate(["grpo"]).manifest)
    with pytest.raises(ManifestMismatch) as failure:
        inspect_nodes(activate(["toy"]).manifest)
    lines = str(failure.value).splitlines()
    assert (lines[2].split()[0], lines[2].split()[-1], len(lines)) == (socket.gethostname(), "-", 4)


def test_a_node_without_what_the_run_reads_is_named(ray_session: Session, tmp_path: Path) -> None:
    full, empty, absent = tmp_path / "full", tmp_path / "empty", tmp_path / "absent"
    empty.mkdir()
    full.mkdir()
    (full / "config.json").touch()
    here = {node["NodeID"] for node in ray.nodes()}
    require_inputs(here, [full, full / "config.json"])
    require_inputs(set(), [absent])
    with pytest.raises(ConfigError) as failure:
        require_inputs(here, [full, empty, absent, full / "train.jsonl"])
    _, *lines, _ = str(failure.value).splitlines()
    node = f"  node {socket.gethostname()} (127.0.0.1): "
    assert lines == [f"{node}{path}" for path in (empty, absent, full / "train.jsonl")]


def test_an_actor_refuses_another_version_and_another_content_and_names_its_node(
    ray_session: Session, site: Site
) -> None:
    manifest = activate(["toy"]).manifest
    newer = refusal_of_an_actor(manifest, site("newer", version="2.0"))
    content = manifest.plugins[1].digest[:12]
    title, _, row, *_ = newer.splitlines()
    assert socket.gethostname() in title
    assert row.split() == ["toy", "acme-toy", "1.0", content, "acme-toy", "2.0", content]
    edited = refusal_of_an_actor(manifest, site("edited", code="class Length: changed = True\n"))
    *_, other = edited.splitlines()[2].split()
    assert content in edited
    assert other != content


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


# --- The device of a cluster that is joined: its nodes decide, not the torch of the driver ----------------------------


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A head without a GPU, as of the driver, and a node with four."""
    with cluster({"num_gpus": 0}, {"num_gpus": 4}) as address:
        yield address


def in_a_new_process(code: str) -> str:
    """What ``code`` prints. This process may have joined the cluster that other tests share, and Ray joins only one."""
    words = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, timeout=120).stdout


def test_the_nodes_of_the_cluster_decide(address: str) -> None:
    printed = in_a_new_process(
        f"""
        import ray
        from slime_core.config.load import load
        from slime_core.runtime.layout import device_of
        from slime_core.runtime.session import Session, cluster_gpus, gpus_at

        config = load(["--ray-address", "{address}"], check_rules=False).config
        print(gpus_at("127.0.0.1:1"), gpus_at("{address}"), ray.is_initialized())
        with Session("{address}", namespace="run"):  # as the run that follows
            print(device_of(config, num_gpus=cluster_gpus()), gpus_at("{address}/"), ray.is_initialized())
        """
    )
    assert printed == "None 4 False\ngpu 4 True\n"


def test_check_says_what_auto_means_there(address: str) -> None:
    words = ["check", "--plugin", "grpo", "--ray-address", address]
    printed = in_a_new_process(f"from slime_core.cli.main import main; assert main({words}) == 0")
    assert "device auto: cuda\n" in printed
    assert "2 bundles of 1 GPU + 1 CPU" in printed
