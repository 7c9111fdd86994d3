r"""Rewrites the ways people write an answer into LaTeX that the parser reads to its end.

``rewritten``  symbols, layout, fonts, numbers and functions in one notation: ``√2`` and ``sqrt(2)`` become ``\sqrt{2}``
``measure``    a number without its unit, percent sign or currency
``words``      the text of an answer without markup; of words also without case
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from functools import cache

__all__ = ["Measure", "is_prose", "is_text", "measure", "rewritten", "words"]

_SYMBOLS = {
    "\u00a0": " ", "\u2009": r"\,", "\u202f": r"\,", "\u2006": r"\,", "\u200a": r"\,", "\u2002": " ", "\u2003": " ",
    "\u200b": "", "\u2061": "", "\ufeff": "", "\u3000": " ",
    "π": r"\pi ", "∞": r"\infty ", "×": r"\times ", "✕": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ",
    "÷": "/", "⁄": "/", "∕": "/", "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "﹣": "-", "±": r"\pm ",
    "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "°": r"^{\circ}",
    "º": r"^{\circ}", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "∈": r"\in ", "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}", "…": r"\ldots ", "⋯": r"\ldots ",
    "’": "'", "‘": "'", "“": '"', "”": '"', "′": "'", "，": ",", "（": "(", "）": ")", "：": ":", "；": ";", "。": ".",
    "％": "%", "＝": "=", "＋": "+", "⟨": r"\langle ", "⟩": r"\rangle ", "∘": r"\circ ", "ⅇ": "e", "ⅈ": "i",
    "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    "⅕": r"\frac{1}{5}", "⅖": r"\frac{2}{5}", "⅗": r"\frac{3}{5}", "⅘": r"\frac{4}{5}", "⅙": r"\frac{1}{6}",
    "⅚": r"\frac{5}{6}", "⅐": r"\frac{1}{7}", "⅛": r"\frac{1}{8}", "⅜": r"\frac{3}{8}", "⅝": r"\frac{5}{8}",
    "⅞": r"\frac{7}{8}", "⅑": r"\frac{1}{9}", "⅒": r"\frac{1}{10}",
    "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "δ": r"\delta ", "ε": r"\epsilon ", "θ": r"\theta ",
    "λ": r"\lambda ", "μ": r"\mu ", "µ": r"\mu ", "ρ": r"\rho ", "σ": r"\sigma ", "τ": r"\tau ", "φ": r"\phi ",
    "ω": r"\omega ", "ψ": r"\psi ", "Δ": r"\Delta ", "Ω": r"\Omega ",
}  # fmt: skip
_TRANSLATION = str.maketrans({**_SYMBOLS, **{chr(0xFF10 + digit): str(digit) for digit in range(10)}})
_UP = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼ⁿⁱˣ⁄", "0123456789+-=nix/")
_DOWN = str.maketrans("₀₁₂₃₄₅₆₇₈₉ₙₖ", "0123456789nk")
_SCRIPTS = [
    (re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱˣ]+"), lambda match: f"^{{{match[0].translate(_UP)}}}"),
    (re.compile("[₀₁₂₃₄₅₆₇₈₉ₙₖ]+"), lambda match: f"_{{{match[0].translate(_DOWN)}}}"),
]

_FUNCTIONS = (
    "arcsin|arccos|arctan|arccot|arcsec|arccsc|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|ln|lg|log|exp|gcd|lcm|max|min|det"
)
_GREEK = (
    "alpha|beta|gamma|delta|epsilon|theta|lambda|mu|rho|sigma|tau|phi|varphi|omega|psi|pi|Delta|Omega|Sigma|Gamma|Phi"
)
_FONT = (
    r"\\(?:math(?:rm|bf|it|sf|tt|normal)|text(?:rm|bf|it|sf|normal)?|mbox|hbox|bm|boldsymbol|operatorname\*?|emph"
    r"|underline|rm|bf)"
)
_SPACE = r"(?:(?<!\\)\\[,!;:> ]|~|\\thinspace|\\quad|\\qquad)"

_Replacement = str | Callable[["re.Match[str]"], str]


def _rules(*rules: tuple[str, _Replacement]) -> list[tuple[re.Pattern[str], _Replacement]]:
    return [(re.compile(pattern), replacement) for pattern, replacement in rules]


_LAYOUT = _rules(
    (r"\\(?:mathrm|text|operatorname)\s*\{\s*~?\s*\}", ""),
    # An option's letter before the answer, as in contests: \textbf{(C)}\ 12.
    (rf"^\s*{_FONT}\s*\{{\s*\([A-E]\)[\s~]*\}}\s*(?:{_SPACE}|\s)*(?=[^\s.])", ""),
    (r"\\[cdt]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\[dt]binom(?![a-zA-Z])", r"\\binom"),
    (r"\\(?:left|right)\s*\.", ""),
    (r"\\(?:left|middle|right|[bB]ig+[lrm]?)(?![a-zA-Z])", ""),
    (r"\\(?:displaystyle|textstyle|limits|mathstrut|therefore|boxed(?!\{))(?![a-zA-Z])", ""),
    (r"\\(?:hspace|vspace|phantom|hphantom|vphantom)\*?\{[^{}]*\}", ""),
    # Thousands with any mark between groups of three digits; a plain comma or space may also separate a list.
    (rf"(?<![\d.])\d{{1,3}}(?:(?:,?\s*{_SPACE}\s*|,?\{{\s*[,.]?\s*\}}|\\,)\d{{3}})+(?!\d)", lambda m: _digits(m[0])),
    (r"(?<![a-z])\{\s*([:,;])\s*\}", r"\1"),
    (rf"{_SPACE}|(?<!\\)\\\s", " "),
    (r"\\(?:lbrace|lbrack)(?![a-zA-Z])", lambda m: r"\{" if "brace" in m[0] else "["),
    (r"\\(?:rbrace|rbrack)(?![a-zA-Z])", lambda m: r"\}" if "brace" in m[0] else "]"),
    (r"\\(?:lang|langle)(?![a-zA-Z])", "("),
    (r"\\(?:rang|rangle)(?![a-zA-Z])", ")"),
    (r"\\(?:lvert|rvert|vert|mid)(?![a-zA-Z])", "|"),
    (r"\\(?:uppi|mathrm\{\\pi\})(?![a-zA-Z])", r"\\pi "),
    (r"\\leq(?:slant|q)?", r"\\le "),
    (r"\\geq(?:slant|q)?", r"\\ge "),
    (r"\\(?:neq|not\s*=)(?![a-zA-Z])", r"\\ne "),
    (r"\\(?:varnothing|O(?![a-zA-Z]))|\\\{\s*\\\}", r"\\emptyset "),
    (r"\\(?:ldots|dots|dotsc|cdots|dotsb)(?![a-zA-Z])|\.\.\.", "..."),
    (r"\\(?:ast|star|bullet)(?![a-zA-Z])", "*"),
    (r"\\(?:div)(?![a-zA-Z])", "/"),
    (r"\\(?:colon|ratio)(?![a-zA-Z])", ":"),
    (r"\\odot(?![a-zA-Z])", r"\\text{sun}"),
    (rf"_\{{\s*(?:{_FONT}\s*\{{\s*)?\\?(max|min)\s*\}}?\s*\}}", r"_{\\text{\1imum}}"),
    (r"(?<!\\log)_\{\s*([A-Za-z]{3,})\s*\}", r"_{\\text{\1}}"),
    # Derivatives: y', f''(x).
    (
        r"(\\[A-Za-z]+\s*|[A-Za-z])(?:_(?:\{(\w+)\}|(\w)))?"
        r"\s*((?:\^\s*(?:\\prime|\{(?:\s*\\prime)+\s*\})|')+)(?!s\b|[a-z]{3})(?:_(?:\{(\w+)\}|(\w)))?",
        lambda m: _derivative(m[1], m[2] or m[3] or m[5] or m[6] or "", m[4]),
    ),
    # Minutes, not the smallest of several numbers.
    (rf"(?<=[\d}}])\s*(?:{_FONT}\s*\{{\s*min\s*\}}|\s*(?<![A-Za-z\\])min(?!\s*[A-Za-z(\\{{]))", r"\\text{ minutes}"),
    (r"\\lt(?![a-zA-Z])", "<"),
    (r"\\gt(?![a-zA-Z])", ">"),
    (r"<=", r"\\le "),
    (r">=", r"\\ge "),
)
_BUILT = re.compile(
    r"\s*\\?\{\s*[a-z]\s*(?:\\in\s*(?:\\mathbb\s*\{?\s*)?R\s*\}?\s*)?[|:](?!.*\\in(?![a-z])|.*\\text\s*\{\s*and)"
    r"((?:[^,:{}\\]|\\[a-zA-Z]+|\{[^{}]*\})*(?:[<>]|\\(?:[lg]e|ne)(?![a-z]))(?:[^,:{}\\]|\\[a-zA-Z]+|\{[^{}]*\})*)\\?\}\s*"
)
"""A set of numbers for which inequalities hold: ``\\{x | x > 2\\}``."""

_FONTS = _rules(
    (r"\{\s*\\(?:rm|bf|it|sf)\s+([^{}]*)\}", r"\\text{\1}"),
    (rf"{_FONT}(?:\s*\{{\s*([ei])\s*\}}|\s+([ei])(?![a-zA-Z]))", lambda m: f" {m[1] or m[2]}"),
    (rf"{_FONT}\s*\{{\s*([,;:])\s*\}}", r"\1"),
    (rf"{_FONT}\s*\{{\s*({_FUNCTIONS})\s*\}}", r"\\\1 "),
    (rf"{_FONT}\s*\{{\s*(\\?)pi\s*\}}", r"\\pi "),
    (rf"{_FONT}\s*\{{\s*([-+\d.,\s/]+)\s*\}}", r"\1"),
    (rf"{_FONT}\s*(?=\{{)", r"\\text"),
)
_NUMBERS = _rules(
    # Repeating decimals.
    (
        r"(\d*)\.(\d*)\s*\\(?:overline|bar|overbar|underline)\s*(?:\{\s*(\d+)\s*\}|(\d))",
        lambda m: _repeating(m[1], m[2], m[3] or m[4]),
    ),
    (r"(\d*)\.(\d*)\s*\\dot\s*\{?(\d)\}?(\d*)\\dot\s*\{?(\d)\}?", lambda m: _repeating(m[1], m[2], m[3] + m[4] + m[5])),
    (r"(\d*)\.(\d*)\s*\\dot\s*\{?(\d)\}?", lambda m: _repeating(m[1], m[2], m[3])),
    (r"(\d*)\.(\d*)\((\d+)\)", lambda m: _repeating(m[1], m[2], m[3])),
    (r"(\d*)\.(\d+)\s*\.\.\.", lambda m: _continued(m[1], m[2])),
    # Scientific notation.
    (r"(?<![A-Za-z\\\d.])(\d+\.?\d*|\.\d+)\s?[eE]\s?\{?([+-]?\d+)\}?(?![\d.])", r"\1\\times 10^{\2}"),
    (r"(?<=\d)\s*(?:[xX*]|\\cdot)\s*10\s*(?=\^|\*\*)", r"\\times 10"),
    (
        r"(?<=\d)\s*(?:\\text\s*\{\s*)?(thousand|million|billion|trillion)\b\s*(\}?)",
        lambda m: _magnitude(m[1], m[2], m[0]),
    ),
    # Mixed numbers, and products that look like them.
    (r"(?<![\d.^_{/])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),
    (r"(?<![\w.^_{}\\])(\d+)\s*(?=\(\d+/\d+\))", r"\1\\cdot "),
    (r"(?<![\d.])\.(?=\d)", "0."),
    (r"(?<=\d)\.(?=\s*(?:[-+*/^)]|$))", ""),
)
_PLAIN = _rules(
    (r"(?<![A-Za-z])(?:np|numpy|math|sympy|sp|cmath)\.(?=[a-z])", ""),
    (r"\*\*", "^"),
    (r"(?<![A-Za-z\\])(?:arc|a)(sin|cos|tan|cot|sec|csc)(?![a-gi-z])", r"\\arc\1 "),
    (r"(?<![A-Za-z\\])(?:infinity|Infinity|infty|inf|oo)(?![A-Za-z])", r"\\infty "),
    (rf"(?<![A-Za-z\\])({_FUNCTIONS}|{_GREEK})(?![A-Za-z])", r"\\\1 "),
    (r"(?<=\d)(pi)(?![A-Za-z])", r"\\pi "),
    (r"√|(?<![A-Za-z\\])sqrt(?![A-Za-z])", r"\\sqrt"),
    (r"∛|(?<![A-Za-z\\])cbrt(?![A-Za-z])", r"\\sqrt[3]"),
    (r"∜", r"\\sqrt[4]"),
    (r"\\lg(?![a-zA-Z])", r"\\log_{10}"),
    (r"\\(sin|cos|tan)\s*\^\s*\{?\s*-\s*1\s*\}?", r"\\arc\1 "),
    (r"\\ne(?![a-z])\s*", r"\\ne "),
)
_REPEATED = re.compile(r"^(\d*?)(\d+?)\2+$")


def rewritten(text: str) -> str:
    r"""Return the answer in the notation of the parser: ``3½ × 10²`` becomes ``3\frac{1}{2} \times 10^{2}``."""
    for pattern, script in _SCRIPTS:
        text = pattern.sub(script, text)
    text = _without_marks(text.translate(_TRANSLATION))
    text = _substituted(text, _LAYOUT)
    built = _BUILT.fullmatch(text)
    text = _substituted(built[1] if built else text, _FONTS)
    text = re.sub(r"\s*,?\s*(?:\\text\s*\{\s*(?:and|or|,|;)\s*\}|(?<![A-Za-z])(?:and|or)(?![A-Za-z]))\s*", ", ", text)
    text = _substituted(text, _NUMBERS)
    text = _substituted(text, _PLAIN)
    text = _grouped(text).strip()
    return re.sub(r"(?<![\\\w}\]^_])\{([^{}]*,[^{}]*)\}", r"\\{\1\\}", text)


def _substituted(text: str, rules: list[tuple[re.Pattern[str], _Replacement]]) -> str:
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text


def _without_marks(text: str) -> str:
    """Return the text without the marks around it: dollar signs, Markdown, a final full stop."""
    text = re.sub(r"\\\$|\$|(?<!\\)\\[()\[\]]|`|\*\*(?=\W|$)|(?<!\w)\*\*", " ", text).replace(r"\%", "%")
    text = re.sub(r"[€£¥₹]|(?<![A-Za-z])(?:US|USD|Rs\.?)(?=\s*\d)", " ", text)
    text = text.strip().strip('"').strip()
    text = re.sub(r"(?<!\.)[.,;:!]?\s*$" if not text.endswith("!") else r"(?!)", "", text)
    return re.sub(r"^(?:=|\\approx|\\therefore|:)\s*", "", text.strip())


def _digits(text: str) -> str:
    return re.sub(r"\D", "", text)


def _derivative(name: str, index: str, primes: str) -> str:
    orders = "prime" * (primes.count("prime") + primes.count("'"))
    return rf"{name}_{{{index}\text{{{orders}}}}}"


def _repeating(integer: str, fixed: str, period: str) -> str:
    r"""``0.1\overline{6}`` is (16 - 1) / 90: the number with one period minus the number without it."""
    numerator = int(integer + fixed + period) - int(integer + fixed or "0")
    value = Fraction(numerator, 10 ** len(fixed) * (10 ** len(period) - 1))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _continued(integer: str, digits: str) -> str:
    """``0.1666...`` repeats its last digits; ``3.14159...`` repeats nothing and is the decimal that it begins with."""
    repeated = _REPEATED.match(digits)
    if repeated is None:
        return f"{integer or '0'}.{digits}"
    fixed, period = repeated[1], repeated[2]
    times = (len(digits) - len(fixed)) // len(period)
    if fixed and times < (3 if len(period) == 1 else 2):
        return f"{integer or '0'}.{digits}"
    return _repeating(integer or "0", fixed, period)


_MAGNITUDES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}


def _magnitude(word: str, closing: str, text: str) -> str:
    opened = "{" in text
    unpaired = "" if opened == bool(closing) else r"\text{" if opened else closing
    return rf"\times 10^{{{_MAGNITUDES[word]}}}{unpaired}"


def _grouped(text: str) -> str:
    r"""Return the text with braces around every argument: ``\frac12`` is ``\frac{1}{2}``, ``x^(1/2)``, ``x^{1/2}``."""
    text = re.sub(r"\{([^{}]*)\\over(?![a-z])([^{}]*)\}", r"\\frac{\1}{\2}", text)
    text = re.sub(r"^([^{}]*)\\over(?![a-z])([^{}]*)$", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\{([^{}]*)\\choose(?![a-z])([^{}]*)\}", r"\\binom{\1}{\2}", text)
    result, place = [], 0
    starts = re.compile(r"\\(?:frac|binom)(?![a-zA-Z])|\\sqrt(?![a-zA-Z])|[\^_]")
    while (match := starts.search(text, place)) is not None:
        result.append(text[place : match.end()])
        place = match.end()
        if match[0] == r"\sqrt":
            root = re.compile(r"\s*\[([^\[\]]*)\]").match(text, place)
            if root:
                result.append(f"[{_grouped(root[1])}]")
                place = root.end()
        for _ in range(2 if match[0] in {r"\frac", r"\binom"} else 1):
            argument, place = _argument(text, place, match[0])
            result.append(f"{{{_grouped(argument)}}}" if argument else "")
    return "".join([*result, text[place:]])


_COMMAND = re.compile(r"\\[a-zA-Z]+\s*")
_SIGNED = re.compile(r"[-+]?\d+(?:\.\d+)?|[-+]?[a-zA-Z]")


def _argument(text: str, place: int, before: str) -> tuple[str, int]:
    """Return the argument that starts at ``place``, without its braces, and its end."""
    while place < len(text) and text[place].isspace():
        place += 1
    if place == len(text):
        return "", place
    opening = text[place]
    if opening == "{" or (opening == "(" and before in {"^", r"\sqrt"}):
        end = _closing(text, place)
        return (text[place + 1 : end], end + 1) if end > 0 else (text[place:], len(text))
    command = _COMMAND.match(text, place)
    if command:
        end = command.end()
        while end < len(text) and text[end] == "{" and (closing := _closing(text, end)) > 0:
            end = closing + 1
        if command[0].strip() == r"\frac" and end == command.end():
            first, end = _argument(text, end, r"\frac")
            second, end = _argument(text, end, r"\frac")
            return rf"\frac{{{first}}}{{{second}}}", end
        return text[place:end], end
    if before in {"^", "_", r"\sqrt"} and (signed := _SIGNED.match(text, place)):
        return signed[0], signed.end()
    return opening, place + 1


def _closing(text: str, start: int) -> int:
    """Return the place at which the bracket at ``start`` closes; -1 if it does not."""
    opening, closing = text[start], {"{": "}", "(": ")"}[text[start]]
    depth = 0
    for place in range(start, len(text)):
        if text[place] == opening and text[place - 1 : place] != "\\":
            depth += 1
        elif text[place] == closing and text[place - 1 : place] != "\\":
            depth -= 1
            if depth == 0:
                return place
    return -1


class Measure:
    """A quantity: ``text`` without its unit; ``unit`` of the table, or empty; whether it is a percentage."""

    def __init__(self, text: str, unit: str = "", *, percent: bool = False) -> None:
        self.text, self.unit, self.percent = text, unit, percent


_UNITS = """
mm millimeter millimetre|cm centimeter centimetre|m meter metre|km kilometer kilometre|in inch inche|ft feet foot
|yd yard|mi mile|mg milligram|g gram|kg kilogram|lb pound|oz ounce|t ton tonne|s sec second|min minute|h hr hour|day
|week|month|yr year|l liter litre|ml milliliter millilitre|n newton|j joule|kj kilojoule|ev|w watt|kw kilowatt
|pa pascal|hz hertz|v volt|ohm|k kelvin|mol mole|rad radian|deg degree|cent|dollar usd
"""
_UNIT_OF = {name: unit.split()[0] for unit in _UNITS.replace("\n", " ").split("|") for name in unit.split()}
_SHORT = (
    r"mm|cm|dm|m|km|nm|in|ft|yd|mi|mg|g|kg|lbs?|oz|s|ms|min|h|hrs?|L|l|mL|ml|N|J|kJ|eV|MeV|W|kW|Pa|kPa|Hz|V|K|mol|rad"
    r"|mph|kmh|km/h|m/s|cm/s|pm"
)
_TEXT_UNIT = re.compile(
    r"(?s)^(.*?[\d})!a-zA-Z|])\s*((?:\\text\s*\{(?:[^{}]|\{[^{}]*\})*\}\s*(?:\^\s*\{?-?\d+\}?)?[\s/.·\\cdot]*)+)$"
)
_WORD_UNIT = re.compile(
    rf"(?s)^(.*?[\d}}])(?:\s+((?:(?:{_SHORT})|(?!{_FUNCTIONS})[A-Za-z]{{3,}})"
    rf"(?:[\s/.-]*[A-Za-z]+\.?(?:\^\{{?-?\d+\}}?)?)*)|((?:{_SHORT})))"
    r"\s*(?:\^\s*\{?-?\d+\}?)?(?:\s*/\s*\w+(?:\^\{?\d\}?)?)?$"
)
_AFTER_PI = re.compile(r"(?s)^(.*\\pi)\s+((?:mm|cm|dm|km|in|ft|yd|mi|kg|m(?=\s*\^\s*\{?[23]))\s*(?:\^\s*\{?[23]\}?)?)$")
"""Units after pi; single letters are more often unknowns."""

_DEGREES = re.compile(r"\s*\^\s*\{?\s*\\(?:circ|degree|circle)\s*\}?|\s*\\degree(?![a-z])")


def measure(text: str) -> list[Measure]:
    r"""Return the readings of a rewritten answer, without unit and percent sign: ``5\text{ cm}`` and ``5 m`` are 5."""
    degrees = _DEGREES.search(text) is not None
    if degrees:
        in_function = re.search(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)(?![a-z])", text) is not None
        text = _DEGREES.sub(r"\\cdot\\frac{\\pi}{180}" if in_function else "", text)
        text = re.sub(r"\s*(?:\\text\s*\{\s*)?[CF]\s*\}?$", "", text) if not in_function else text
    if re.search(r"%.*%|[\d})]\s*[-+*^].*%|%\s*[-+*/^]", text):  # a term of a sum, not the sign of the whole answer
        text = re.sub(r"(\d+(?:\.\d+)?)\s*%", r"\\frac{\1}{100}", text)
    percent = re.fullmatch(r"(?s)(.*[\d}.)])\s*(?:%|\\text\s*\{\s*(?:%|percent|percentage|pct)\s*\}|percent|pct)", text)
    if percent:
        return [Measure(percent[1], percent=True)]
    worded = _TEXT_UNIT.match(text)
    if worded and re.search(r"\d|\\pi|\\sqrt|\\infty", worded[1]):
        return [Measure(worded[1].strip(), _unit(worded[2]))]
    readings = [Measure(text)]
    named = _WORD_UNIT.match(text)
    if named:
        readings.append(Measure(named[1].strip(), _unit(named[2] or named[3])))
    after_pi = _AFTER_PI.match(text)
    if after_pi:
        readings.append(Measure(after_pi[1], _unit(after_pi[2].partition("^")[0])))
    return readings


def _unit(text: str) -> str:
    """Return the short name of a unit of the table; empty for others, which are not compared."""
    name = re.sub(r"\^\s*\{?[23]\}?$|\\text|[{}\s.]", "", text.strip()).strip()
    if name in _UNIT_OF:
        return _UNIT_OF[name]
    name = name.lower()
    return _UNIT_OF.get(name) or _UNIT_OF.get(name.removesuffix("s")) or ""


_MARKUP = re.compile(
    rf"{_FONT}\s*\{{([^{{}}]*)\}}|\\(?:left|right|displaystyle)(?![a-zA-Z])|(?<!\\)\\[,!;: ()\[\]]|\*\*|[$`]|~"
)


def words(text: str) -> str:
    """Return the text of an answer without markup, spaces and final punctuation; words also without case."""
    text = re.sub(r"\{([:,;])\}", r"\1", text)
    is_words = is_text(text)
    if is_words and "," in text:
        text = re.sub(r"(?<=\w),?\s+and\s+(?=\w)", ", ", text)
    plain = re.sub(r"\s+", "", _MARKUP.sub(r" \1 ", text.replace(r"\%", "%").translate(_TRANSLATION))).strip('"')
    plain = plain.strip("'") if plain.startswith("'") else plain  # at the end alone it is a derivative
    plain = plain.lower() if is_words else plain
    plain = re.sub(r"(?<=\d)([ap])\.m\.?", r"\1m", plain)
    plain = re.sub(r"^0?(\d{1,2})(?::00)?(?=[ap]m$)", r"\1:00", plain) if is_words else plain
    plain = re.sub(r"[.,;:]$", "", plain)
    return re.sub(r"^\((\w)\)$", r"\1", plain)


@cache
def _names() -> re.Pattern[str]:
    return re.compile(rf"(?:{_FUNCTIONS}|{_GREEK}|infinity|infty|inf|sqrt|cbrt|np|and|or|abs)(?![a-z])")


def is_text(text: str) -> bool:
    r"""Return whether an answer is words, not an expression: ``\text{odd}``, ``no solution``, ``10:30 AM``."""
    if re.fullmatch(rf"(?s)\s*{_FONT}\s*\{{[^{{}}]*[A-Za-z]{{2}}[^{{}}]*\}}\s*\.?\s*", text):
        return re.search(r"\d", text) is None
    if re.search(r"[\\^_=<>|\d]", text):
        return (
            re.fullmatch(
                rf"[\s$]*(?:\d{{1,2}}:\d\d|0?[1-9]|1[0-2])(?:[\s~$]|\\[,;: ])*(?:{_FONT}\s*\{{)?[\s~]*"
                r"[ap]\.?m\.?[\s}$.]*",
                text,
                re.IGNORECASE,
            )
            is not None
        )
    return is_prose(text)


_SHORT_WORDS = re.compile(r"(?:^|\s)(?:is|it|we|to|of|at|by|so|be|an|if|no|on)(?:\s|$)", re.IGNORECASE)


def is_prose(text: str) -> bool:
    """Return whether a text has words of a sentence outside ``\\text`` and other commands."""
    plain = re.sub(rf"{_FONT}\s*\{{[^{{}}]*\}}|\{{[a-z]{{3}}\}}|\\begin\{{\w+\}}|\\end\{{\w+\}}|\\[A-Za-z]+", " ", text)
    words = re.findall(r"[A-Za-z]{3,}", plain)
    return _SHORT_WORDS.search(plain) is not None or any(
        re.search("[eiouyEIOUY]", word) and not _names().fullmatch(word) for word in words
    )
