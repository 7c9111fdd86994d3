"""Plugins replace parts of the loss: each part at most once."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core import Place
from slime_core.errors import PluginError
from slime_core.learner.components import collect_loss_parts
from slime_core.plugins.activation import activate
from slime_core.plugins.lifecycle import Hooks
from slime_core.provisional import LearnerInfo, LossParts
from slime_testing.harness.megatron import small_shard

CODE = """
from slime_core import hookimpl
from slime_core.provisional import LossParts

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
    hooks = Hooks(activate(names).registry, place=Place.RANK, options={})
    return collect_loss_parts(hooks, LearnerInfo(rank=0, world_size=1, settings={}))


@pytest.mark.parametrize(
    ("returned", "parts"),
    [
        ([], set()),
        (["None", "LossParts(reduce=part)"], {"reduce"}),
        (["LossParts(correct=part)", "LossParts(reduce=part)"], {"correct", "reduce"}),
    ],
)
def test_parts_of_several_plugins_go_together(tmp_path, returned, parts):
    assert merged(tmp_path, *returned).given == parts


@pytest.mark.parametrize(
    ("returned", "names"),
    [
        (["LossParts(reduce=part)", "LossParts(reduce=part)"], "plugin1, plugin0 .*reduce "),
        (["3"], "plugin0 .* 3;.*LossParts"),
    ],
)
def test_two_plugins_for_one_part_and_something_else_than_parts_are_refused(tmp_path, returned, names):
    with pytest.raises(PluginError, match=f"^slime_loss_parts.*{names}"):
        merged(tmp_path, *returned)


def test_columns_may_be_changed_before_training(tmp_path):
    file = tmp_path / "mask.py"
    file.write_text(
        "from slime_core import hookimpl\n@hookimpl\ndef slime_before_training(shard, steps):\n"
        "    for step in steps:\n        for micro in step:\n            micro.advantages_U = micro.advantages_U * 2\n"
    )
    shard, steps = small_shard()
    hooks = Hooks(activate([str(file)]).registry, place=Place.RANK, options={})
    assert hooks.call("slime_before_training", shard=shard, steps=steps) == []
    assert [micro.advantages_U.tolist() for step in steps for micro in step] == [[2.0, 2.0], [-2.0]]
