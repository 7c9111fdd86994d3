"""Megatron on a GPU without TransformerEngine and Apex: only the patches for these libraries are active.

The GPU is simulated: what Megatron places on ``cuda`` stays on the CPU, and ``torch.cuda`` answers as for one device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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
        found = function(*args, **kwargs)
        return found.replace("torch.", "torch.cuda.", 1) if function is torch.Tensor.type and len(args) == 1 else found

torch.cuda.is_available = lambda: True
from slime_core.cpu import megatron
megatron.install()
torch.cuda.is_available = lambda: False
for name, value in vars(megatron.CUDA).items():
    if name not in ("is_available", "random", "amp", "current_device", "manual_seed", "manual_seed_all"):
        setattr(torch.cuda, name, value)
torch.cuda.current_device = lambda: 0
torch.cuda._lazy_call = lambda function: function()
torch.cuda.random.get_rng_state = megatron.CUDA.get_rng_state
torch.cuda.manual_seed = torch.cuda.manual_seed_all = lambda seed: None

from slime_core.harness.megatron import start_single_rank
with SimulatedGPU():
    layout = start_single_rank()
    from slime_core.checkpoint import sharded
    from slime_core.config.schema import OptimizerConfig
    from slime_core.learner.optimizer import build_optimizer, build_schedule, wrap
    from tests.engines.families import build, write
    from tests.engines.test_freezing import FAMILY, micro_batch

    folder = Path(sys.argv[1])
    write(FAMILY, folder / "model")

    class Run:
        def __init__(self):
            settings = OptimizerConfig(lr=1e-3)
            _, self.chunks = build(FAMILY, folder / "model", layout)
            self.model = wrap(self.chunks, bf16=False)
            self.optimizer = build_optimizer(self.model, settings, bf16=False)
            self.schedule = build_schedule(self.optimizer, settings, num_steps=4)
            self.parts = {"chunks": self.chunks, "optimizer": self.optimizer, "schedule": self.schedule}

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
            inner = [one.optimizer for one in getattr(self.optimizer, "chained_optimizers", [self.optimizer])]
            return sorted({float(state["step"]) for one in inner for state in one.state.values()})

    first, second = Run(), Run()
    first.step()
    sharded.save(folder / "saved", **first.parts)
    first.step()
    sharded.load(folder / "saved", **second.parts)
    loaded = second.steps()
    second.step()
    pairs = zip(first.chunks[0].parameters(), second.chunks[0].parameters(), strict=True)
    literal = sys.modules["megatron.core.optimizer.optimizer"].__dict__.get("_slime_cuda")
    print(json.dumps([loaded, second.steps(), all(torch.equal(a, b) for a, b in pairs), literal is None]))
"""


def test_a_mixture_trains_and_resumes_with_the_patches_for_missing_libraries_alone(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    # On a GPU, Megatron compiles functions of a line; here that would take minutes.
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, "-c", ON_GPU, tmp_path]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == [[1.0], [2.0], True, True]
