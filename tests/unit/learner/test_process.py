from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime_core.config.learning import LearnerConfig, ParallelConfig
from slime_core.config.schema import ClusterConfig, DebugConfig, RunConfig
from slime_core.errors import ConfigError
from slime_core.learner import LearnerSettings
from slime_core.modeling.layout import ParallelLayout


def test_the_settings_of_a_run_become_a_layout():
    settings = ParallelConfig(
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        pipeline_model_parallel_size=3,
        num_virtual_stages_per_pipeline_rank=4,
        context_parallel_size=5,
        expert_model_parallel_size=6,
    )
    expected = ParallelLayout(tensor=2, sequence=True, pipeline=3, virtual_pipeline=4, context=5, expert=6)
    assert ParallelLayout.of(settings) == expected
    assert expected.expert_tensor == 2
    experts = ParallelConfig(tensor_model_parallel_size=4, expert_model_parallel_size=8, expert_tensor_parallel_size=1)
    assert ParallelLayout.of(experts).expert_tensor == 1
    assert ParallelLayout.of(experts).data_size(8) == 2


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: ParallelLayout(tensor=2, expert_tensor=1), r"expert tensor size 1 .* 2 .* 1"),
        (lambda: ParallelLayout(tensor=4, expert=8).data_size(8), r"expert size 8 x .* 4 .* 8 ranks"),
        (lambda: ParallelLayout(pipeline=4).stages(2), r" 2 .* 3 chunks"),
        (lambda: ParallelLayout(tensor=2, pipeline=2).data_size(6), "multiple of 4"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(make, names):
    with pytest.raises(ConfigError, match=names):
        make()


@pytest.mark.parametrize(
    ("layout", "multiple"),
    [
        (ParallelLayout(tensor=2), 1),
        (ParallelLayout(tensor=2, sequence=True), 2),
        (ParallelLayout(context=2), 4),
        (ParallelLayout(tensor=2, sequence=True, context=4), 16),
    ],
)
def test_a_row_divides_among_those_who_share_it(layout, multiple):
    assert layout.row_multiple == multiple


def test_ranks_of_one_replica_have_one_data_rank():
    layout = ParallelLayout(tensor=2, context=2, pipeline=2)
    ranks = [layout.data_rank(rank, world_size=16) for rank in range(16)]
    assert ranks == [0, 0, 0, 0, 1, 1, 1, 1] * 2
    assert layout.coordinates(15, world_size=16) == {"tensor": 1, "context": 1, "data": 1, "pipeline": 1}
    assert layout.coordinates(6, world_size=16) == {"tensor": 0, "context": 1, "data": 1, "pipeline": 0}


def test_layers_left_over_go_to_the_first_stages_and_the_last_may_hold_the_logits_only():
    assert [chunk.count("decoder") for chunk in ParallelLayout(pipeline=3).stages(8)] == [3, 3, 2]
    chunks = ParallelLayout(pipeline=2, virtual_pipeline=2).stages(3)
    assert chunks == [["embedding", "decoder"], ["decoder"], ["decoder"], ["loss"]]


FAULTS = """
import resource
import torch
from slime_cpu.device import keep_freed_memory

keep_freed_memory()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(10_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print([faults() for _ in range(40)][-1])
"""


def test_freed_memory_is_used_again_without_page_faults():
    """40 MB are 10,000 pages, or 20 large ones. The first tensors may leave holes too small for the next."""
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 10


class CudaStarts(Exception):
    """The device is selected: everything after it may start CUDA."""


@pytest.mark.parametrize(
    ("learner", "debug", "expected"),
    [
        ({}, {"debug_train_only": True}, True),
        ({"deterministic_mode": True}, {}, True),
        ({"deterministic_mode": False}, {"debug_train_only": True}, False),
        ({}, {}, False),
    ],
)
def test_a_deterministic_run_switches_everything_before_cuda_starts(monkeypatch, learner, debug, expected):
    import torch

    from slime_core.learner.process import DETERMINISTIC, prepare_process

    switched: list[tuple[bool, bool, bool]] = []

    def start(_: object) -> None:
        is_set = all(os.environ.get(name) == value for name, value in DETERMINISTIC.items())
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        switched.append((is_set, torch.are_deterministic_algorithms_enabled(), warns))
        raise CudaStarts

    for name in DETERMINISTIC:
        monkeypatch.setenv(name, "")  # restores it after the test
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", start)
    config = RunConfig(
        cluster=ClusterConfig(device="cuda"), learner=LearnerConfig(**learner), debug=DebugConfig(**debug)
    )
    try:
        with pytest.raises(CudaStarts):
            prepare_process(LearnerSettings(config, Path("model"), "Toy", "clipped", 1))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
    assert switched == [(expected, expected, False)]
