"""Where the final answer stands in a response."""

from __future__ import annotations

import re

__all__ = ["after_thinking", "answer_line", "last_boxed"]

_ANSWER = re.compile(r"^[^\S\n]*(?:\*\*)?answer(?:\*\*)?[^\S\n]*:(?:\*\*)?(.*)$", re.IGNORECASE | re.MULTILINE)


def last_boxed(text: str) -> str | None:
    r"""What stands in the last complete ``\boxed{...}``, braces balanced; None: there is none.

    Example: ``last_boxed(r"so \boxed{\frac{1}{2}}") == r"\frac{1}{2}"``.
    """
    for opening in reversed([found.end() for found in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for place in range(opening, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[opening:place]
    return None


def after_thinking(text: str) -> str | None:
    """What follows the last ``</think>``; None: the thinking was not ended."""
    _, mark, answer = text.rpartition("</think>")
    return answer if mark else None


def answer_line(text: str) -> str | None:
    """What follows ``Answer:`` on the last line that begins so; None: no line does."""
    found = _ANSWER.findall(text)
    return str(found[-1]).strip() if found else None
