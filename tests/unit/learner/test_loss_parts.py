"""Plugins replace parts of the loss: each part at most once."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core import LearnerInfo, LossParts, Place
from slime_core.errors import PluginError
from slime_core.harness.megatron import small_shard
from slime_core.learner.components import collect_loss_parts
from slime_core.plugins.activation import activate
from slime_core.plugins.lifecycle import LifecycleHooks

CODE = """
from slime_core import LossParts, hookimpl

def part(loss_U, mask_U, micro):
    return loss_U.sum()

@hookimpl
def slime_loss_parts():
    return {returned}
"""


def merged(folder: Path, *returned: str) -> LossParts:
    """The parts of a run with one plugin a text."""
    for number, text in enumerate(returned):
        (folder / f"plugin{number}.py").write_text(f"NUMBER = {number}\n{CODE.format(returned=text)}")
    names = [str(folder / f"plugin{number}.py") for number in range(len(returned))]
    hooks = LifecycleHooks(activate(names).registry, place=Place.RANK, options={})
    return collect_loss_parts(hooks, LearnerInfo(rank=0, world_size=1, settings={}))


def test_without_plugins_every_part_is_the_cores(tmp_path):
    assert merged(tmp_path) == LossParts()


def test_a_plugin_that_answers_none_replaces_nothing(tmp_path):
    assert merged(tmp_path, "None", "LossParts(reduce=part)").given == {"reduce"}


def test_parts_of_several_plugins_go_together(tmp_path):
    assert merged(tmp_path, "LossParts(correct=part)", "LossParts(reduce=part)").given == {"correct", "reduce"}


def test_two_plugins_cannot_replace_the_same_part(tmp_path):
    with pytest.raises(PluginError, match=r"^slime_loss_parts: .*plugin0, plugin1 .*reduce "):
        merged(tmp_path, "LossParts(reduce=part)", "LossParts(reduce=part)")


def test_something_else_than_parts_is_refused(tmp_path):
    with pytest.raises(PluginError, match=r"^slime_loss_parts .*plugin0 .* 3;.*LossParts"):
        merged(tmp_path, "3")


def test_columns_may_be_changed_before_training(tmp_path):
    file = tmp_path / "mask.py"
    file.write_text(
        "from slime_core import hookimpl\n@hookimpl\ndef slime_before_training(shard, steps):\n"
        "    for step in steps:\n        for micro in step:\n            micro.advantages_U = micro.advantages_U * 2\n"
    )
    shard, steps = small_shard()
    hooks = LifecycleHooks(activate([str(file)]).registry, place=Place.RANK, options={})
    assert hooks.results("slime_before_training", shard=shard, steps=steps) == []
    assert [micro.advantages_U.tolist() for step in steps for micro in step] == [[2.0, 2.0], [-2.0]]
