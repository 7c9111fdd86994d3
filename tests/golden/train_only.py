"""Trains on a small recorded rollout (``--load-debug-rollout-data``): metrics of each step and a digest of its weights.

Runs are started as a user starts them, so they survive any change of what is inside. Metrics are stored in
``train_only.json`` and compared by ``tests/e2e/test_train_only.py`` with a tolerance. Bits of weights depend on the
CPU, so digests are compared on one machine only, before and after a change:

    python -m tests.golden.train_only --write DIGESTS      of the commit before
    python -m tests.golden.train_only --compare DIGESTS    of the commit after

``--store`` writes ``train_only.json`` again; ``--only NAME`` trains one case. A case takes about 20 s of two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STORED = HERE / "train_only.json"
LIMIT_S = 900
ALL = (
    f"--load-debug-rollout-data {HERE}/rollouts/{{rollout_id}}.jsonl --num-rollout 3 --rollout-batch-size 6 "
    "--n-samples-per-prompt 4 --rollout-temperature 1.4 --eval-interval none --eval-prompt-data none --lr 2e-4 "
    "--lr-warmup-iters 0 --lr-decay-style constant --save-interval 1"
)
CASES = {
    "grpo": "--plugin grpo --use-kl-loss --kl-loss-coef 0.1 --entropy-coef 0.01 --corrections tis "
    "--num-steps-per-rollout 2 --eps-clip-high 0.28",
    "ppo": "--plugin ppo --kl-coef 0.05 --gamma 0.9 --lambd 0.95 --normalize-advantages --micro-batch-size 4",
    "corrections": "--plugin grpo --advantage-estimator dr_grpo --corrections mis veto opsm --mis-level sequence "
    "--mis-mode mask --opsm-delta 1e-3 --calculate-per-token-loss --sample-transforms punish_overlong "
    "--overlong-buffer-len 4",
    "layout": "--plugin grpo --actor-num-gpus-per-node 2 --tensor-model-parallel-size 2 --sequence-parallel "
    "--max-tokens-per-gpu 96 --use-opd --opd-teacher-load {model}",
}
"""Name -> flags. Together: estimators on samples and on tokens, every correction, a critic, a reference model, a
teacher, several steps a rollout, several micro-batches, two ranks."""


def train(name: str) -> list[dict[str, Any]]:
    """Rows of the steps: ``metrics`` (without times) and ``weights``, a digest of names, shapes and bits.

    Raises:
        RuntimeError: the run failed; with what it printed.
    """
    model = next(HERE.parents[1].glob("slime_core/**/model/model.safetensors")).parent
    words = f"{ALL} {CASES[name].format(model=model)}".split()
    with tempfile.TemporaryDirectory(prefix="slime-golden-") as folder:
        command = [sys.executable, "-m", "slime_core", "run", *words, "--output-dir", folder, "--progress", "none"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        if done.returncode:
            raise RuntimeError(f"{name}: exit code {done.returncode}\n{done.stderr}{done.stdout}")
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        return [
            {
                "metrics": {key: value for key, value in row.items() if key.startswith(("train/", "rollout/"))},
                "weights": _digest(Path(folder) / "checkpoints" / f"step-{row['step'] + 1:06}" / "hf"),
            }
            for row in rows
        ]


def _digest(checkpoint: Path) -> str:
    from safetensors.numpy import load_file

    digest = hashlib.sha256()
    for name, array in sorted(load_file(checkpoint / "model.safetensors").items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.train_only", description=__doc__)
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--write", type=Path, metavar="DIGESTS")
    parser.add_argument("--compare", type=Path, metavar="DIGESTS")
    parser.add_argument("--store", action="store_true")
    chosen = parser.parse_args()
    found = {name: train(name) for name in ([chosen.only] if chosen.only else CASES)}
    for name, rows in found.items():
        for step, row in enumerate(rows):
            metrics = row["metrics"]
            print(name, step, f"{metrics['train/loss']:+.9f}", f"{metrics['train/grad_norm']:.9f}", row["weights"])
    if chosen.store:
        stored = {name: [row["metrics"] for row in rows] for name, rows in found.items()}
        cases = (
            f' "{name}": [\n' + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]"
            for name, rows in stored.items()
        )
        STORED.write_text("{\n" + ",\n".join(cases) + "\n}\n")
    if chosen.write:
        chosen.write.write_text(json.dumps(found, indent=1) + "\n")
    if chosen.compare is None:
        return 0
    before = json.loads(chosen.compare.read_text())
    different = [name for name, rows in found.items() if rows != before[name]]
    print(f"not bit for bit as before: {', '.join(different)}" if different else "bit for bit as before")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
