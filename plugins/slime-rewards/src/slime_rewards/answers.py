"""Finds the final answer in a response.

``last_boxed``      the content of the last box that holds something
``answer_line``     the text of the last line ``Answer: ...``
``final_answers``   the places in which a response may state its answer, the most explicit first
"""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["MOST_LETTERS", "after_thinking", "answer_line", "final_answers", "last_boxed", "stated"]

MOST_LETTERS = 2000
"""No answer is longer."""

_ANSWER = re.compile(
    r"^[^A-Za-z0-9\n]*+(?:final[^\S\n]+)?answer[^\S\n]*+(?:\*\*|__)?[^\S\n]*+:(?:\*\*|__)?(.*)$",
    re.IGNORECASE | re.MULTILINE,
)
_BRACES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\[{}]|[{}]")
"""The start of a box; escaped braces, which are printed; all other braces."""

_JOINED = re.compile(r"[\s$]*(?:\\[()\[\]])?[\s$]*(?:,|;|and|or|,\s*and|,\s*or)?[\s$]*(?:\\[()\[\]])?[\s$]*")
_STATED = re.compile(
    r"(?:\b(?:answers?|solutions?|result)\b(?:\*\*|__)?[^\n.:=$\\]{0,60}?(?:\b(?:is|are|be)\b(?!\s+(?:not|that|because))|[:=])"
    r"|^[^\S\n]*+####)(?:\*\*|__)?\s*[:=]?\s*",
    re.IGNORECASE | re.MULTILINE,
)
_MATH = re.compile(
    r"\$\$(.{1,1000}?)\$\$|\\\[(.{1,1000}?)\\\]|\\\((.{1,1000}?)\\\)|(?<!\\)\$([^$\n]{1,1000}?)(?<!\\)\$", re.DOTALL
)
_AFTER_MATH = re.compile(r"\s*(?:\\?%|percent\b)")
_BETWEEN = re.compile(r"\s*(?:,?\s*and|,?\s*or|,)\s*")
_SENTENCE = re.compile(
    r"(?<=[^\s.\\])[.!?](?=\s|$|\*)|(?<!\\),\s+(?!and\b|or\b)(?=[a-z]{2})|(?<!\\);|\s+\(?(?:because|since|which|where|when|so|as|but|not)\b|\n",
    re.IGNORECASE,
)
_TERM = (
    r"(?:\\[dtc]?frac\s*\{[^{}]*\}\s*\{[^{}]*\}|\\sqrt(?:\[\d+\])?\s*\{[^{}]*\}|\\pi\b|π|√\d+|[½⅓⅔¼¾]"
    r"|[€£]?\\?\$?\.?\d[\d,]*(?:\.\d+)?(?:\s?[eE][+-]?\d+)?(?:\^\{?-?\d+\}?)?!?(?:\\?%|\.\.\.|…)?)"
)
_EXPRESSION = re.compile(
    rf"(?<![\w.])[-−+(]{{0,4}}{_TERM}(?:(?:\s*(?:\\times|\\cdot|[-−+*/^=×·÷x])\s*|(?<=\d):(?=\d)|\s+(?=\d+/\d)|[()]{{1,4}})?[-−(]{{0,4}}{_TERM}\){{0,4}})*"
)


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete ``\boxed{...}`` or ``\fbox{...}``, braces balanced; None if missing.

    A box without content is ignored. If boxes are nested, the innermost is returned.

    Example: ``last_boxed(r"so \boxed{\frac{1}{2}}") == r"\frac{1}{2}"``.
    """
    boxes = _boxes(text)
    return text[boxes[-1][1] : boxes[-1][2]] if boxes else None


def _boxes(text: str) -> list[tuple[int, int, int]]:
    """Return the start of each innermost box with a content, and the start and end of its content."""
    opened: list[re.Match[str]] = []
    boxes: list[tuple[int, int, int]] = []
    for brace in _BRACES.finditer(text):
        if brace["box"] or brace[0] == "{":
            opened.append(brace)
        elif brace[0] == "}" and opened:
            opening = opened.pop()
            holds_box = bool(boxes) and boxes[-1][0] > opening.start()
            if opening["box"] and not holds_box and text[opening.end() : brace.start()].strip():
                boxes.append((opening.start(), opening.end(), brace.start()))
    return boxes


def after_thinking(text: str) -> str | None:
    """Return the text after the last ``</think>``; None if the response has no ``</think>``."""
    _, mark, answer = text.rpartition("</think>")
    return answer if mark else None


def answer_line(text: str) -> str | None:
    """Return the text after ``Answer:`` or ``Final answer:`` on the last line that starts so; None if no line does.

    If nothing follows on the line, the answer is the next line. Markup before the words, such as ``**`` and ``#``, is
    ignored."""
    matches = list(_ANSWER.finditer(text))
    if not matches:
        return None
    line = matches[-1][1].strip()
    return line if re.search(r"\w", line) else (text[matches[-1].end() :].strip().partition("\n")[0].strip() or line)


def final_answers(text: str) -> Iterator[list[str]]:
    r"""Yield the ways to read the statement of a response's answer: the most explicit place of these.

    The last box; the last "the answer is ..." or ``#### ...``; the last formula or number. The answer follows the
    thoughts; of thoughts that were not ended only a box counts.
    """
    answer = after_thinking(text)
    unfinished = answer is None and "<think>" in text
    text = answer if answer is not None and answer.strip() else text
    boxes = _boxes(text)
    if boxes:
        yield [text[boxes[-1][1] : boxes[-1][2]], *_joined(text, boxes)]
        return
    if unfinished:
        return
    statements = list(_STATED.finditer(text))
    if statements:
        yield from ([answer] for answer in stated(text[statements[-1].end() :]))
    if len(text) <= MOST_LETTERS and (_is_formula(text) or not re.search(r"\d", text)):
        yield [text]
    last = _last_expression(text)
    if last is not None:
        yield [last]


def _joined(text: str, boxes: list[tuple[int, int, int]]) -> list[str]:
    r"""Return the last boxes as one list if only "and" or a comma is between them: ``\boxed{2} and \boxed{3}``."""
    first = len(boxes) - 1
    while first and _JOINED.fullmatch(text, boxes[first - 1][2] + 1, boxes[first][0]):
        first -= 1
    return [", ".join(text[start:end] for _, start, end in boxes[first:])] if first < len(boxes) - 1 else []


def stated(text: str) -> list[str]:
    """Return the readings of a text that begins with an answer: its box, its first formulas, its first sentence."""
    box = last_boxed(text)
    if box is not None:
        return [box]
    text = re.sub(r"^[\s*_`>#]+", "", text)[:MOST_LETTERS]
    formulas = _formulas(text)
    if formulas is not None:
        return [formulas]
    cut = _SENTENCE.search(text)
    sentence = text[: cut.start()] if cut else text
    last = _last_expression(sentence)
    return [sentence, *([last] if last is not None else [])]


def _formulas(text: str) -> str | None:
    """Return the formulas at the start of a text, joined by commas; None if it starts with something else."""
    formulas, place = [], 0
    while (match := _MATH.match(text, place)) is not None and _is_formula(_content(match)):
        percent = _AFTER_MATH.match(text, match.end())
        formulas.append(_content(match) + ("%" if percent else ""))
        between = _BETWEEN.match(text, percent.end() if percent else match.end())
        if between is None:
            break
        place = between.end()
    return ", ".join(formulas) or None


def _content(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None)


def _is_formula(text: str) -> bool:
    """Return whether the text between two dollar signs is a formula, not what is between two amounts of money."""
    plain = re.sub(r"\\[a-zA-Z]+|\{[^{}]*\}", "", text)
    return re.search(r"[A-Za-z]{3}|\s[A-Za-z]{2}\s", plain) is None


def _last_expression(text: str) -> str | None:
    """Return the last formula or number of a text; None if it has none."""
    formula, number = None, None
    place = 0
    while (match := _MATH.search(text, place)) is not None:
        is_formula = _is_formula(_content(match))
        formula, place = (match if is_formula else formula), (match.end() if is_formula else match.start() + 1)
    for match in _EXPRESSION.finditer(text):
        number = match
    if formula is not None and (number is None or number.end() <= formula.end()):
        return _content(formula) + ("%" if _AFTER_MATH.match(text, formula.end()) else "")
    return None if number is None else number[0]
