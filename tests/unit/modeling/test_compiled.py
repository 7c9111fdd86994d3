"""torch.compile takes the rotary embedding and SwiGLU as whole graphs, for rows of any length."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json
import torch
from slime_core.modeling import prepare_megatron
prepare_megatron()
from megatron.core.models.common.embeddings import rope_utils
from slime_core.modeling.kernels import compile_pointwise
from slime_core.modeling.mlp import swiglu

def results():
    found = []
    for length in (5, 33, 64, 7):
        random = torch.Generator().manual_seed(length)
        both, scale, heads, angles = (
            torch.randn(length, *shape, generator=random) for shape in ((24,), (1,), (1, 4, 16), (1, 1, 8))
        )
        both, heads = both.bfloat16().requires_grad_(), heads.bfloat16().requires_grad_()
        rotated = rope_utils._apply_rotary_pos_emb_bshd(heads, angles)
        for output, given in ((swiglu(both, scale.requires_grad_()), both), (swiglu(both), both), (rotated, heads)):
            found += [output.detach(), *torch.autograd.grad(output.float().square().sum(), given)]
    return found

torch.set_num_threads(1)
plain = results()
for _ in range(2):
    compile_pointwise("aot_eager")
torch._dynamo.utils.counters.clear()
compiled = results()
equal = [torch.equal(*pair) for pair in zip(plain, compiled, strict=True)]
print(json.dumps([equal, torch._dynamo.utils.counters["stats"]["unique_graphs"]]))
"""


@pytest.mark.long
def test_graphs_are_whole_and_serve_rows_of_any_length():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    equal, graphs = json.loads(done.stdout)
    assert equal == [True] * 24
    assert graphs == 5  # with a scale and without, forward and backward; the rotary embedding
