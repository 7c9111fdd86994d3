"""Megatron on a GPU without TransformerEngine and Apex: only the patches for these libraries are active.

The GPU is simulated: what Megatron places on ``cuda`` stays on the CPU, and ``torch.cuda`` answers as for one device. A
tensor is on that device unless it was made from one that was copied to the host. Attention, whose kernels are real,
sees the CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ON_GPU = """
import json, sys, warnings
from pathlib import Path
import torch
import torch._dynamo
from torch.overrides import TorchFunctionMode

warnings.simplefilter("ignore")

class SimulatedGPU(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = {key: False if key == "pin_memory" else value for key, value in (kwargs or {}).items()}
        if str(kwargs.get("device", "")).startswith(("cuda", "0")):
            kwargs["device"] = "cpu"
        if function in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if function == torch.Tensor.is_cuda.__get__:
            # Attention has kernels of its own on a GPU.
            return not is_on_host(args[0]) and "modeling/rows" not in sys._getframe(1).f_code.co_filename
        moves_to = next((one for one in args if isinstance(one, str) and one in ("cpu", "cuda")), "")
        found = function(*("cpu" if one is moves_to else one for one in args), **kwargs)
        on_host = function == torch.Tensor.cpu or moves_to == "cpu" or (args and is_on_host(args[0]))
        if isinstance(found, torch.Tensor) and on_host and moves_to != "cuda":
            found.is_on_host = True
        return found.replace("torch.", "torch.cuda.", 1) if function is torch.Tensor.type and len(args) == 1 else found

def is_on_host(tensor):
    return getattr(tensor, "is_on_host", False)

torch.cuda.is_available = lambda: True
from slime_core.modeling import prepare_megatron
from slime_cpu.megatron import CUDA
prepare_megatron()
torch.cuda.is_available = lambda: False
for name, value in vars(CUDA).items():
    if name not in ("is_available", "random", "amp", "current_device", "manual_seed", "manual_seed_all"):
        setattr(torch.cuda, name, value)
torch.cuda.current_device = lambda: 0
torch.cuda._lazy_call = lambda function: function()
torch.Tensor.record_stream = lambda tensor, stream: None
torch.cuda.random.get_rng_state = CUDA.get_rng_state
torch.cuda.manual_seed = torch.cuda.manual_seed_all = lambda seed: None

from slime_testing.harness.megatron import start_single_rank

folder = Path(sys.argv[1])
gpu = SimulatedGPU()
gpu.__enter__()
layout = start_single_rank()
from slime_core.checkpoint import sharded
from slime_core.config.schema import OptimizerConfig
from slime_core.learner.optimizer import build_optimizer, build_schedule, reset_optimizer_states, wrap
from tests.checkpoints import write_copies
from tests.engines.families import build, write
from tests.engines.learners import micro_batch

FAMILY = "qwen3_moe"
write(FAMILY, folder / "model")

class Run:
    def __init__(self, *, bf16=False, **overrides):
        settings = OptimizerConfig(lr=1e-3)
        _, self.chunks = build(FAMILY, folder / "model", layout)
        if bf16:
            self.chunks = [chunk.bfloat16() for chunk in self.chunks]
            for chunk in self.chunks:
                chunk.config.bf16, chunk.config.params_dtype = True, torch.bfloat16
        self.model = wrap(self.chunks, bf16=bf16)
        self.optimizer = build_optimizer(self.model, settings, bf16=bf16, overrides=overrides)
        self.schedule = build_schedule(self.optimizer, settings, num_steps=4)
        self.parts = {"chunks": self.chunks, "optimizer": self.optimizer, "schedule": self.schedule}
        self.inner = [one.optimizer for one in self.optimizer.chained_optimizers]

    def step(self):
        micro = micro_batch()
        self.model[0].zero_grad_buffer()
        self.optimizer.zero_grad()
        packed = micro.packed_sequence
        logits = self.model[0](micro.tokens_1T, micro.position_ids_1T, None, packed_seq_params=packed)
        logits.log_softmax(-1)[..., 3].sum().backward()
        self.model[0].finish_grad_sync()
        self.optimizer.step()

    def steps(self):
        return sorted({float(state["step"]) for one in self.inner for state in one.state.values()})

    def weights(self):
        return [parameter.detach().clone() for chunk in self.chunks for parameter in chunk.parameters()]

def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
"""

RESUMING = """
first, second = Run(), Run()
first.step()
write_copies([sharded.copy(folder / "saved", **first.parts)])
first.step()
sharded.load(folder / "saved", **second.parts)
loaded = second.steps()
second.step()
literal = sys.modules["megatron.core.optimizer.optimizer"].__dict__.get("_slime_cuda")
print(json.dumps([loaded, second.steps(), same(first.weights(), second.weights()), literal is None]))
"""

OFFLOADING = """
from slime_core.learner.process import _optimizer_tensors

def offloaded(folder, fraction, overlaps):
    folder.mkdir()
    hybrid = {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True,
              "optimizer_offload_fraction": fraction, "overlap_cpu_optimizer_d2h_h2d": overlaps}
    plain, offloaded = Run(bf16=True), Run(bf16=True, **hybrid)
    found = {}
    write_copies([sharded.copy(folder / "fresh", **offloaded.parts)])
    found["a save before the first step changes no weight"] = same(plain.weights(), offloaded.weights())
    for run in (plain, offloaded):
        run.step()
        run.step()
    found["equal to the plain optimizer"] = same(plain.weights(), offloaded.weights())
    state = [(parameter, value) for one in offloaded.inner for part in one.sub_optimizers
             for parameter, held in part.state.items() for value in held.values() if value.dim()]
    on_host = sum(value.numel() for parameter, value in state if is_on_host(parameter))
    found["share on the host"] = on_host / sum(value.numel() for _, value in state)
    moved = [tensor for tensor in _optimizer_tensors(offloaded.optimizer) if is_on_host(tensor)]
    found["an offloaded rank leaves alone what is on the host"] = not moved
    for name, saved, loads in (("offloaded", offloaded, {}), ("plain", plain, hybrid), ("both", offloaded, hybrid)):
        write_copies([sharded.copy(folder / name, **saved.parts)])
        resumed = Run(bf16=True, **loads)
        sharded.load(folder / name, **resumed.parts)
        held = resumed.steps()
        reference = Run(bf16=True)
        sharded.load(folder / name, **reference.parts)
        equal = same(resumed.weights(), plain.weights())
        for run in (resumed, reference):
            run.step()
        found[f"resumes {name}"] = [held, equal, resumed.steps(), same(resumed.weights(), reference.weights())]
    for run in (plain, offloaded):
        reset_optimizer_states(run.optimizer)
        run.step()
    found["equal after a reset"] = [offloaded.steps(), same(plain.weights(), offloaded.weights())]
    return found

print(json.dumps([offloaded(folder / f"case-{at}", *case) for at, case in enumerate(json.loads(sys.argv[2]))]))
"""


def run_on_gpu(script: str, folder: Path, *words: str) -> Any:
    # On a GPU, Megatron compiles functions of a line; here that would take minutes.
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, "-c", ON_GPU + script, str(folder), *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def test_a_mixture_trains_and_resumes_with_the_patches_for_missing_libraries_alone(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    assert run_on_gpu(RESUMING, tmp_path) == [[1.0], [2.0], True, True]


CASES = {(0.0, False): 0, (0.5, True): 0.5, (1.0, False): 1, (1.0, True): 1}
"""Fraction of the optimizer to offload, whether its copies overlap -> share of its state that is then on the host."""


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[float, bool], dict[str, Any]]:
    """The report of each case, all in one process."""
    reports = run_on_gpu(OFFLOADING, tmp_path_factory.mktemp("hybrid"), json.dumps([*CASES]))
    return dict(zip(CASES, reports, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_hybrid_optimizer_trains_and_resumes_as_the_plain_one(hybrid, case) -> None:
    report = hybrid[case]
    assert report.pop("share on the host") == pytest.approx(CASES[case], abs=0.1)
    assert report.pop("equal after a reset") == [[1.0], True]
    resumes = [report.pop(f"resumes {name}") for name in ("offloaded", "plain", "both")]
    assert resumes == [[[2.0], True, [3.0], True]] * 3
    assert len(report) == 3
    assert all(report.values()), report
