"""The decision on every flag of slime (kept, renamed, refused, later), for ``docs/flags.md`` and error messages.

The table is ``flags.txt``; a row is ``flag | verdict | text``. Verdicts:

    kept      the flag exists here under the same name; the text says where its values differ
    renamed   the text is the flag to write here, then why or how
    no effect accepted, because the run does this without it; the text says which values, if there are several, and why
    refused   the text says why there is no such flag
    later     the feature is not built yet; the text says which it is

``megatron_flags.txt`` lists the flags of Megatron's scripts that a run does not pass on, grouped by reason.

``python -m slime_compat.flags docs/flags.md`` writes the page.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Literal, cast, get_args

from slime_compat.launch_flags import Described, checks

__all__ = ["BEYOND", "SlimeFlag", "advice", "groups", "metrics", "page", "slime_flags"]

Verdict = Literal["kept", "renamed", "no effect", "refused", "later"]

BEYOND = ("parsed elsewhere", "named by users, not by slime's parser")
"""Groups beyond the 237 flags that slime's own parser has or had in 2026."""

Check = Callable[[Sequence[str], Described], str | None]
"""Gets the words after a flag and the checkpoint's ``config.json``, and returns the mistake, or None."""

_TABLE = Path(__file__).resolve().parent / "flags.txt"
_METRICS = _TABLE.with_name("metrics.txt")
_MEGATRON = _TABLE.with_name("megatron_flags.txt")


@dataclass(frozen=True, slots=True)
class SlimeFlag:
    """One row of the table.

    Example: ``SlimeFlag("--rollout-seed", "renamed", "--seed, one for the whole run")``.
    """

    flag: str
    verdict: Verdict
    text: str

    @property
    def message(self) -> str:
        """The error message for the flag; empty if the flag is accepted."""
        texts = {
            "kept": "",
            "no effect": "",
            "renamed": f"{self.flag} has another name here: {self.text}",
            "refused": f"{self.flag}: there is no such setting: {self.text}",
            "later": f"{self.flag}: not built yet: {self.text}",
        }
        return texts[self.verdict]


@cache
def groups() -> Mapping[str, tuple[SlimeFlag, ...]]:
    """Return group of slime's parser -> its flags, in the order of the table."""
    _, *parts = _TABLE.read_text(encoding="utf-8").split("\n## ")
    titled = (part.strip().partition("\n") for part in parts)
    return {title: tuple(map(_row, rows.splitlines())) for title, _, rows in titled}


@cache
def slime_flags() -> Mapping[str, SlimeFlag]:
    """Return every row by its flag."""
    return {row.flag: row for rows in groups().values() for row in rows}


def advice() -> Mapping[str, str | Check]:
    """Return a map from each flag of slime or of Megatron's scripts that is not a setting here to its error message.

    A flag that is accepted without effect maps to the check of its value.
    """
    refused = {row.flag: row.message for row in slime_flags().values() if row.message}
    why = {row.flag: row.text for row in slime_flags().values() if row.verdict == "no effect"}
    accepted = {flag: partial(_checked, check, why.get(flag)) for flag, check in checks().items()}
    return {**accepted, **_megatron_advice(), **refused}


def _checked(check: Check, why: str | None, words: Sequence[str], described: Described) -> str | None:
    """Return the mistake that ``check`` finds, followed by the text of the table; None: the flag is accepted."""
    mistake = check(words, described)
    return mistake if mistake is None or why is None else f"{mistake}; {why}"


def _megatron_advice() -> dict[str, str]:
    found: dict[str, str] = {}
    for part in _MEGATRON.read_text(encoding="utf-8").split("\n\n")[1:]:
        reason, _, names = part.partition("\n")
        flags = ("--" + name.replace("_", "-") for name in names.split())
        found |= {flag: f"{flag}: not passed on to Megatron: {reason}" for flag in flags}
    return found


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
        f"| `{theirs}` | {f'`{ours}`' if ours else 'none'} | {_marked_up(text)} |" for theirs, ours, text in metrics()
    ]
    return "\n".join([*parts, ""])


@cache
def metrics() -> tuple[tuple[str, str, str], ...]:
    """Return slime's metrics: slime's name, our name (may be empty), and the difference."""
    rows = (line.split("|", 2) for line in _METRICS.read_text(encoding="utf-8").splitlines())
    return tuple((theirs.strip(), ours.strip(), text.strip()) for theirs, ours, text in rows)


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
`python -m slime_compat.flags docs/flags.md` writes this page from it.

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


def _row(line: str) -> SlimeFlag:
    flag, verdict, text = (cell.strip() for cell in line.split("|", 2))
    return SlimeFlag(flag, cast(Verdict, verdict), text)


def _marked_up(text: str) -> str:
    return " ".join(_as_code(word) if word.startswith("--") else word for word in text.split())


def _as_code(word: str) -> str:
    bare = word.rstrip(",;:")
    return f"`{bare}`{word[len(bare) :]}"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
