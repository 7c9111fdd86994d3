"""Extracts the final answer of a response."""

from __future__ import annotations

import re

__all__ = ["after_thinking", "answer_line", "last_boxed"]

_ANSWER = re.compile(r"^[^\w\n]*(?:final[^\S\n]+)?answer(?:\*\*)?[^\S\n]*:(?:\*\*)?(.*)$", re.IGNORECASE | re.MULTILINE)
_BRACES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\[{}]|[{}]")
"""The start of a box; escaped braces, which are printed; all other braces."""


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete ``\boxed{...}`` or ``\fbox{...}``, braces balanced; None: there is none.

    If boxes are nested, the innermost is returned.

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
    """Return the text after the last ``</think>``; None: the response has no ``</think>``."""
    _, mark, answer = text.rpartition("</think>")
    return answer if mark else None


def answer_line(text: str) -> str | None:
    """Return the text after ``Answer:`` or ``Final answer:`` on the last line that starts so; None: no line does.

    Markup before the words, such as ``**`` and ``#``, is ignored."""
    found = _ANSWER.findall(text)
    return str(found[-1]).strip() if found else None
