"""How long a save keeps training waiting against a plain copy of the same bytes, alternately in one process.

    python -m bench.save FOLDER [--repeats N]

For models of three sizes, on one rank and on two data-parallel ones: the bytes of the checkpoint that the first rank
copies (weights in both formats, and its part of the optimizer's state), the least seconds of ``Tensor.clone`` of that
many bytes in tensors of those sizes, of the call that blocks training, their ratio, and of the writing that follows it
in the background. FOLDER gets the checkpoints, up to 2.5 GB at a time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from slime_core.checkpoint.folder import RunState, draft_of
from slime_core.config.schema import ClusterConfig, RunConfig
from slime_core.learner.actor import LearnerActor
from slime_core.learner.background_save import SaveSettings, complete
from slime_core.modeling.layout import ParallelLayout
from slime_core.runtime.actors import uncollected
from tests.engines.families import write
from tests.ranks import free_address, learner_of, prepare, run_ranks

if TYPE_CHECKING:
    from slime_core.checkpoint.sharded import WrittenPart

ARCHITECTURE = "Qwen3ForCausalLM"
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
SIZES = ((256, 6), (512, 12), (768, 10))
"""Hidden size and layers."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="the call of a save that blocks training, against a copy of its bytes")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repeats", type=int, default=4)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    prepare()
    print("| parameters, million | ranks | bytes copied, MiB | a copy, s | the call, s | ratio | writing, s |")
    print("|---|---|---|---|---|---|---|")
    for hidden, layers in SIZES:
        sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers, **HEADS}
        model = write("qwen3", given.folder / f"model-{hidden}", vocab_size=8192, **sizes)
        for ranks in (1, 2):
            found = given.folder / "found.json"
            work = partial(measure, model, given.folder, free_address(), ranks, given.repeats)
            run_ranks(f"{hidden} on {ranks}", ranks, work, limit_s=900)
            print(json.loads(found.read_text()), flush=True)


def measure(model: Path, folder: Path, address: str, ranks: int, repeats: int, rank: int) -> None:
    """Measure on one rank; rank 0 writes a row of the table."""
    config = RunConfig(cluster=ClusterConfig(device="cpu", actor_num_gpus_per_node=ranks))
    layout = ParallelLayout()
    with uncollected():  # as in a run: Megatron collects garbage at every save
        learner = learner_of(config, model, ARCHITECTURE, rank=rank, ranks=ranks, address=address, layout=layout)
    actor = LearnerActor.__new__(LearnerActor)  # without Ray and plugins
    actor._learner, actor._export = learner, None
    saving = SaveSettings(folder / "checkpoints", model)
    copied: list[int] = []
    times: dict[str, list[float]] = {"copy": [], "call": [], "write": []}
    for step in range(repeats + 1):
        draft = draft_of(saving.folder, step)
        dist.barrier()
        started = time.perf_counter()
        actor.copy(draft, saving)
        times["call"].append(time.perf_counter() - started)
        copied = copied or sizes_of(actor)
        dist.barrier()
        started = time.perf_counter()
        parts = actor.write()
        everything: list[list[WrittenPart]] = [[] for _ in range(ranks)]
        dist.all_gather_object(everything, parts)
        if rank == 0:
            complete(partial(list, chain(*everything)), RunState(step), saving)
        times["write"].append(time.perf_counter() - started)
        sources = [torch.ones(size // 4) for size in copied]
        dist.barrier()
        started = time.perf_counter()
        clones = [source.clone() for source in sources]
        times["copy"].append(time.perf_counter() - started)
        del clones, sources
        if rank == 0:
            shutil.rmtree(saving.folder)
    if rank == 0:
        # The first round also loads code.
        copy, call, writing = (min(times[name][1:]) for name in ("copy", "call", "write"))
        millions = sum(part.numel() for part in learner.actor.chunks[0].parameters()) / 1e6
        row = (f"{millions:.1f}", ranks, f"{sum(copied) / 2**20:.0f}", f"{copy:.3f}", f"{call:.3f}")
        cells = " | ".join(map(str, (*row, f"{call / copy:.2f}", f"{writing:.2f}")))
        (folder / "found.json").write_text(json.dumps(f"| {cells} |"))
    learner.close()


def sizes_of(actor: LearnerActor) -> list[int]:
    """Return the bytes of each tensor that the rank copied: weights and its part of the optimizer's state."""
    (copy,) = actor._copies
    gathers = copy._gathers
    values = [value for _, value in copy._items if isinstance(value, torch.Tensor)]
    weights = [value.nbytes for value in values if value.untyped_storage().data_ptr() not in gathers.storages]
    own = [parts[group.rank()].nbytes for group, parts in gathers._parts]
    exported = actor._export.args[1] if isinstance(actor._export, partial) else []
    return [*weights, *own, *(weight.nbytes for _, weight in exported)]


if __name__ == "__main__":
    main()
