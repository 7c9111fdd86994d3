"""``compute_score`` of slime's ``math_dapo_utils``, which reward functions for slime import.

Without strict boxes the answer is compared as a number or as text, after removing LaTeX around it; ``--rm-type dapo``
of slime-rewards also compares expressions.
"""

from __future__ import annotations

import re
from typing import Any

__all__ = ["compute_score"]

TAIL, BOX_TAIL = 300, 100
"""Characters at the end of a response in which slime looks for an answer, and for a box with ``strict_box_verify``."""


def compute_score(
    solution_str: str,
    ground_truth: Any,
    strict_box_verify: bool = False,
    pause_tokens_index: list[int] | None = None,
) -> dict[str, Any]:
    """Return ``score``, 1.0 or -1.0; ``acc``, whether the answer is right; and ``pred``, the answer that was found.

    Arguments:
        strict_box_verify: the answer is the text in the last ``\\boxed{...}``, compared exactly; else it is the rest of
            the last line with ``Answer:``.
        pause_tokens_index: ignored; slime's functions may pass it.
    """
    del pause_tokens_index
    tail = solution_str[-TAIL:]
    if strict_box_verify:
        answer = _last_box(tail[-BOX_TAIL:])
        right = answer is not None and answer == str(ground_truth)
    else:
        lines = re.findall(r"(?i)answer\s*:\s*([^\n]+)", tail)
        answer = _plain(lines[-1]) if lines else "[INVALID]"
        right = _number(answer) == _number(_plain(str(ground_truth)))
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": answer}


def _last_box(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    depth = 0
    for place in range(start + len("\\boxed"), len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : place]
    return None


def _plain(answer: str) -> str:
    """Return an answer without LaTeX around it, spaces and commas between digits."""
    boxed = _last_box(answer)
    text = answer if boxed is None else boxed
    text = re.sub(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"[*$\s]|\\[ ,;!()\[\]]", "", text).removesuffix(".")
    return re.sub(r"(?<=\d),(?=\d{3})", "", text.rpartition("=")[2])


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
