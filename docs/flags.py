"""Write docs/flags.md, the decision on every flag of slime, from slime-compat: ``python -m docs.flags FILE``."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import get_args

from slime_compat.flags import Verdict, groups, slime_flags

__all__ = ["metrics", "page"]

METRICS = Path(__file__).with_name("slime_metrics.txt")


def page() -> str:
    """Return the text of ``docs/flags.md``."""
    counts = {verdict: sum(row.verdict == verdict for row in slime_flags().values()) for verdict in get_args(Verdict)}
    listed = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    parts = [_HEAD.format(counts=listed, total=len(slime_flags()))]
    for group, rows in groups().items():
        parts += [f"## {group}\n", "| flag | here | |", "|---|---|---|"]
        parts += [f"| `{row.flag}` | {row.verdict} | {_marked_up(row.text)} |" for row in rows]
        parts.append("")
    parts += ["## Metrics\n", _METRICS_HEAD, "| slime's | here | |", "|---|---|---|"]
    parts += [
        f"| `{metric}` | {f'`{name}`' if name else 'none'} | {_marked_up(text)} |" for metric, name, text in metrics()
    ]
    return "\n".join([*parts, ""])


@cache
def metrics() -> tuple[tuple[str, str, str], ...]:
    """Return slime's metrics: slime's name, our name (may be empty), and the difference."""
    rows = (line.split("|", 2) for line in METRICS.read_text(encoding="utf-8").splitlines())
    return tuple((metric.strip(), name.strip(), text.strip()) for metric, name, text in rows)


_HEAD = """\
# slime's flags, one by one

Every flag of slime's command line, and what it is here. {total} flags: {counts}.

- *kept*: the same name.
- *renamed*: the name here.
- *no effect*: accepted, because a run does this anyway; other values are refused.
- *refused*: there is no such flag, and why.
- *later*: the feature is not built yet.

With `slime-compat` installed, the error message of a flag that is not accepted says the same. The table is
`plugins/slime-compat/src/slime_compat/flags.txt`, in the distribution `slime-compat`; the tests check each row, and
`python -m docs.flags docs/flags.md` writes this page from it.

Megatron's own flags keep Megatron's names: `slime run --help megatron` lists those that a run may set. Flags that
describe the model (`--num-layers 36`) are compared with the checkpoint, and flags that choose a kernel
(`--attention-backend flash`) have no effect. SGLang's are its
own with `--sglang-` before them: `python -m sglang.launch_server --help`.

## Moving a command

- `train.py` is `slime run --plugin grpo`: the plugin brings the estimator. `slime check` with the same flags reports
  all mistakes at once and starts nothing.
- `train_async.py` is the same with `--async-buffer-size 1`.
- Nothing has to be converted to torch_dist: `--hf-checkpoint`, `--ref-load` and the others take Hugging Face folders,
  and every checkpoint holds one (`hf/`). What is in torch_dist already stays usable: see
  [checkpoints](checkpoints.md).
- `--load` and `--save` were often one folder. A run has its own, `--output-dir`; `--load RUN` resumes it with its
  settings.
- `--colocate` plans engines on all of the learner's devices, as slime does; `--rollout-num-gpus N` takes fewer.
- Functions by path stay as they are ([how they are written](plugins.md#functions-named-by-path)).
"""


_METRICS_HEAD = """\
Metrics that slime logs, and their names in `metrics.jsonl` and TensorBoard here; [metrics](metrics.md) explains each.
"""


def _marked_up(text: str) -> str:
    return " ".join(_as_code(word) if word.startswith("--") else word for word in text.split())


def _as_code(word: str) -> str:
    bare = word.rstrip(",;:")
    return f"`{bare}`{word[len(bare) :]}"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
