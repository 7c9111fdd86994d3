"""Extracts the final answer of a response."""

from __future__ import annotations

import re

__all__ = ["after_thinking", "answer_line", "last_boxed"]

_ANSWER = re.compile(r"^[^\w\n]*(?:final[^\S\n]+)?answer(?:\*\*)?[^\S\n]*:(?:\*\*)?(.*)$", re.IGNORECASE | re.MULTILINE)
_BRACES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\[{}]|[{}]")
"""What opens a box; braces that are printed and group nothing; other braces."""


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete ``\boxed{...}`` or ``\fbox{...}``, braces balanced; None: there is none.

    Of boxes inside each other it is the innermost.

    Example: ``last_boxed(r"so \boxed{\frac{1}{2}}") == r"\frac{1}{2}"``.
    """
    opened: list[re.Match[str]] = []
    start, end = -1, -1
    for brace in _BRACES.finditer(text):
        if brace["box"] or brace[0] == "{":
            opened.append(brace)
        elif brace[0] == "}" and opened:
            opening = opened.pop()
            if opening["box"] and opening.end() > start:
                start, end = opening.end(), brace.start()
    return None if start < 0 else text[start:end]


def after_thinking(text: str) -> str | None:
    """The text after the last ``</think>``; None: the thinking was not ended."""
    _, mark, answer = text.rpartition("</think>")
    return answer if mark else None


def answer_line(text: str) -> str | None:
    """What follows ``Answer:`` or ``Final answer:`` on the last line that starts so, marks such as ``**`` and ``#``
    aside; None: no line does."""
    found = _ANSWER.findall(text)
    return str(found[-1]).strip() if found else None
