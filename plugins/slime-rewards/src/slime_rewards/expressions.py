r"""Reads answers as expressions and compares them. ``math-verify`` and its LaTeX parser do the reading.

``read``  the readings of an answer; a text that the parser does not read to its end has none
``same``  whether two expressions are equal

Numbers are compared with relative precision. Without decimals, two numbers are equal if 3,000 digits agree. A decimal
equals a number that rounds to it if it is precise to :data:`PRECISION`: 0.333333 equals 1/3, 0.333 does not.
Expressions with unknowns are equal if they have equal values at four points (Schwartz-Zippel).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from itertools import accumulate
from typing import Any

from slime_rewards.answers import MOST_LETTERS
from slime_rewards.notation import is_prose, measure, rewritten

__all__ = ["PRECISION", "Reading", "read", "same"]

PRECISION = 1e-5
"""A decimal equals numbers that round to it if half a unit of its last digit, relative to it, is at most this: six
significant digits always suffice."""

_ROUNDING = 1e-12
"""Relative error of arithmetic with decimals."""

_DEEPEST = 20
"""Brackets within brackets; the parser's time grows steeply with their number."""

_STORED = 60
"""Digits that store a decimal, plus one for each of its decimal places, so that 12.50 keeps its zero."""

_DIGITS, _MANY_DIGITS = 40, 3000
"""Significant digits in which numbers are compared at first, and if they agree in these."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One way to read an answer.

    Attributes:
        value: the expression, of sympy.
        unit: its unit, if it is a common one; empty otherwise.
        percent: whether it is a percentage; ``value`` is the number before the sign.
        is_list: whether it is a list without brackets, whose order may or may not matter.
    """

    value: Any
    unit: str = ""
    percent: bool = False
    is_list: bool = False


def read(text: str) -> list[Reading]:
    """Return the readings of an answer, the likeliest first; empty if the parser does not read the whole text."""
    return list(_readings(rewritten(text))) if len(text) <= MOST_LETTERS else []


def _readings(text: str) -> Iterator[Reading]:
    for quantity in measure(text):
        number = quantity.text.strip()
        if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?", number) or re.fullmatch(
            r"[-+]?\d{1,3}( \d{3})+(\.\d+)?", number
        ):
            value = _parse(number.replace(",", "").replace(" ", ""))
            yield Reading(value, quantity.unit, quantity.percent)
            if re.fullmatch(r"[-+]?\d{1,3}(,[1-9]\d{2})+", number):
                yield Reading(_parse(number.replace(",", ", ")), quantity.unit, quantity.percent, is_list=True)
                continue
        elif not re.search(r"[\[({]", number):
            number = re.sub(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])", lambda match: match[0].replace(",", ""), number)
        based = re.fullmatch(r"([0-9A-F]+)_\{?(?:\\text)?\{?(\d+|two|eight)\}*", number)
        if based:
            value = _in_base(based[1], {"two": 2, "eight": 8}.get(based[2]) or int(based[2]))
            if value is not None:
                yield value
                continue
        if re.search(r"\d\s*:\s*\d", number):
            yield from _ratio(number)
            continue
        if _SET.match(number):
            yield Reading(_described(number))
            continue
        if re.search(r"\{[^{}]*\\(?:pm|mp)(?![a-z])", number):
            value = _both_signs(number)
        elif "," in number and re.search(r"[<>]|\\[lg]e ", number):
            value = _alternatives(number)
        else:
            value = _parse(number)
        if value is not None:
            is_list = not re.search(r"^\s*(?:[A-Za-z]+\s*(?:=|\\in))?\s*\\?[({\[]", number)
            yield Reading(value, quantity.unit, quantity.percent, is_list)


_SET = re.compile(r"\\?\{\s*(?:[a-z]|\([a-z]\s*,\s*[a-z]\))\s*(?:\\in[^|:]*)?(?::|\|(?=[^|]*(?:\|[^|]*\|[^|]*)*$))")


def _described(text: str) -> Any:
    r"""Return a symbol for a set that is described, such as ``\{x | x = 3k, k \in \mathbb{Z}\}``: it is its text."""
    from sympy import Symbol

    return Symbol(re.sub(r"\\mathbb\{(\w)\}", r"\1", re.sub(r"\s", "", text)).strip("\\{}").replace(":", "|"))


def _both_signs(text: str) -> Any:
    r"""Return the two values of an expression with ``\pm`` within it."""
    from sympy import FiniteSet

    text = re.sub(r"^\s*[A-Za-z]\s*=", "", text)
    values = []
    for plus, minus in ("+-", "-+"):
        values.append(_parse(re.sub(r"\\(pm|mp)(?![a-z])", plus, text.replace(r"\mp", minus))))
    return FiniteSet(*values) if None not in values else None


def _in_base(digits: str, base: int) -> Reading | None:
    from sympy import Integer, Symbol, Tuple

    if not 2 <= base <= 36 or any(int(digit, 36) >= base for digit in digits):
        return None
    return Reading(Tuple(Symbol("digits"), Integer(int(digits, base)), Integer(base), Symbol(digits)))


def _ratio(text: str) -> Iterator[Reading]:
    """A clock's time is compared as text; a ratio as numbers relative to the last."""
    if re.fullmatch(r"\d{1,2}:[0-5]\d(:[0-5]\d)?", text):
        return
    terms = [_parse(term) for term in text.split(":")]
    if any(term is None or not term.is_number for term in terms):
        return
    from sympy import Mul, Pow, Tuple

    inverse = Pow(terms[-1], -1, evaluate=False)
    relative = [Mul(term, inverse, evaluate=False) for term in terms[:-1]]
    yield Reading(relative[0] if len(relative) == 1 else Tuple(*relative))


def _alternatives(text: str) -> Any:
    """Return the set of numbers for which one of several inequalities holds."""
    from sympy import Union

    try:
        sets = [_as_set(_parse(part)) for part in text.split(",")]
    except (TypeError, ValueError, AttributeError, NotImplementedError):
        return _parse(text)
    return Union(*sets) if all(alternative is not None for alternative in sets) else _parse(text)


@cache
def _parser() -> Any:
    """The LaTeX parser of math-verify, changed to refuse a text that it does not read to the end.

    ``0.\\overline{3}`` would be read as 0: its grammar does not demand the end of the text."""
    from antlr4 import Token
    from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy

    logging.getLogger("math_verify").setLevel(logging.ERROR)

    class Parser(_Latex2Sympy):  # type: ignore[misc]
        def create_parser(self, latex_str: str) -> Any:
            parser = super().create_parser(latex_str)
            if not hasattr(self, "tokens"):  # the first is of the whole text; others are of parts
                self.tokens = parser.getTokenStream()
            return parser

        def convert_set_relation(self, expr: Any) -> Any:
            self.check_end()
            return super().convert_set_relation(expr)

        def convert_set_elements(self, expr: Any) -> Any:
            self.check_end()
            return super().convert_set_elements(expr)

        def convert_set_elements_relation(self, expr: Any) -> Any:
            self.check_end()
            return super().convert_set_elements_relation(expr)

        def check_end(self) -> None:
            if self.tokens.LA(1) != Token.EOF:
                raise ValueError("the text continues after the expression")

        def parse_number(self, text: str) -> Any:
            from sympy import Float, Integer

            digits = text.replace(",", "")
            places = len(digits.partition(".")[2])
            return Integer(digits) if digits.isdigit() else Float(digits, dps=_STORED + places)

    return Parser


_TOKEN = re.compile(r"\\text\s*\{[^{}]*\}|_\{(?:[^{}]|\{[^{}]*\})*\}|\\[A-Za-z]+|[A-Za-z]")
_NAME = re.compile(r"\s*\\?[A-Za-z]")
_POWER_OF_E = re.compile(
    r"\\(?!exp)[A-Za-z]+|e\s*\^\s*\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}|\\exp\s*(?:\((?:[^()]|\([^()]*\))*\)|\{[^{}]*\})"
)
_DIFFERENTIAL = re.compile(
    r"\\int|\}\s*\{\s*(?:d|\\partial)\s*\\?[A-Za-z]+\s*(?:\^\{\d\})?\s*\}|/\s*\(?d|d[^=]*=.*d|\\text\s*\{d\}"
)
r"""Where a letter d may belong to a derivative, an integral or differentials; elsewhere it is an unknown."""

_ACRONYMS = re.compile(r"\s*(?=[A-Z]*([A-Z])[A-Z]*\s*=[A-Z\s]*\1)[A-Z]{2,}\s*=\s*[A-Z]{2,}\s*")
"""An equation of names such as ``MR=MC``; as products, a letter of both sides would be cancelled."""


def _parse(text: str) -> Any:
    """Return the expression that a rewritten text is; None if the parser does not read all of it."""
    if not text or is_prose(text) or _depth(text) > _DEEPEST:
        return None
    if not re.search(r"\\(?:sum|prod)", text):
        # The imaginary unit; a capital I is the parser's name for it and anyone's name for a current.
        text = _TOKEN.sub(lambda m: r"\text{current}" if m[0] == "I" else m[0], text)
        text = _POWER_OF_E.sub(lambda m: _TOKEN.sub(lambda token: "I" if token[0] == "i" else token[0], m[0]), text)
        text = re.sub(r"(?<![A-Za-z\\{])i(?![A-Za-z])|(?<=\{)i(?=\s*[}+*\\-])", "I", text)
    text = re.sub(r"\\gamma(?![a-zA-Z])", r"\\text{gam}", text)  # to the parser it is the function of this name
    text = re.sub(r"(?<!\\)E(?=_)", r"\\text{energy}", text)  # to the parser it is 2.718 and has no index
    if not _DIFFERENTIAL.search(text):
        text = _TOKEN.sub(lambda m: r"\text{d}" if m[0] == "d" and _NAME.match(m.string, m.end()) else m[0], text)
    if _ACRONYMS.fullmatch(text):
        text = re.sub(r"[A-Z]+", lambda m: rf"\text{{{m[0] if len(m[0]) > 2 else ''.join(sorted(m[0]))}}}", text)
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig
    from sympy import nan, zoo

    try:
        value = _parser()(is_real=True, config=ConversionConfig(lowercase_symbols=False)).parse(text)
        return None if value is None or value.has(zoo, nan) else value
    except RecursionError:
        raise
    except Exception:  # the library raises Exception for every text that it cannot read
        return None


def _depth(text: str) -> int:
    return max(accumulate((letter in "({[") - (letter in ")}]") for letter in text))


def same(first: Reading, second: Reading) -> bool:
    """Return whether two readings are equal: their values, and their units if both have one of the common units."""
    if first.unit and second.unit and first.unit != second.unit:
        return False
    if _equal(first.value, second.value, is_list=first.is_list or second.is_list):
        return True
    if first.percent == second.percent:
        return False
    from sympy import Mul, Rational

    share, other = (first, second) if first.percent else (second, first)
    return _is_number(share.value) and _equal(Mul(share.value, Rational(1, 100), evaluate=False), other.value)


def _equal(first: Any, second: Any, *, is_list: bool = False) -> bool:
    from sympy import FiniteSet, Interval, MatrixBase, Set, Tuple
    from sympy.core.relational import Relational
    from sympy.logic.boolalg import Boolean

    first, second = _evaluated(first), _evaluated(second)
    if type(first) is type(second) and first == second:
        return True
    if _is_digits(first) or _is_digits(second):
        return _equal_digits(first, second)
    # x = 5 for 5, and the last of a = b = 5; of two equations both sides count.
    if _is_equation(first) != _is_equation(second):
        first, second = _right_side(first), _right_side(second)
        if type(first) is type(second) and first == second:
            return True
    if _is_number(first) and _is_number(second):
        return _equal_numbers(first, second)
    if isinstance(first, MatrixBase) and isinstance(second, MatrixBase):
        return first.shape == second.shape and _equal_items(list(first), list(second))
    if isinstance(first, Interval) and isinstance(second, Interval):
        ends = (first.left_open, first.right_open) == (second.left_open, second.right_open)
        return bool(ends) and _equal_items([first.start, first.end], [second.start, second.end])
    if isinstance(first, FiniteSet) and isinstance(second, FiniteSet):
        return _equal_sets(_items(first), _items(second))
    if isinstance(first, Tuple | MatrixBase | FiniteSet) or isinstance(second, Tuple | MatrixBase | FiniteSet):
        ordered = [_items(value) for value in (first, second)]
        if all(ordered) and (is_list or (not isinstance(first, FiniteSet) and not isinstance(second, FiniteSet))):
            return _equal_items(
                [_right_side(value) for value in ordered[0]], [_right_side(value) for value in ordered[1]]
            )
        return False
    if isinstance(first, Set) != isinstance(second, Set):
        first, second = (value if isinstance(value, Set) else _as_set(value) for value in (first, second))
        return first is not None and second is not None and _equal_regions(first, second)
    if isinstance(first, Set):
        return _equal_regions(first, second)
    if isinstance(first, Relational) and isinstance(second, Relational):
        return _equal_relations(first, second)
    if isinstance(first, Boolean) and isinstance(second, Boolean):
        sets = _as_set(first), _as_set(second)
        return None not in sets and _equal_regions(*sets)
    return _equal_everywhere(first, second)


def _is_digits(value: Any) -> bool:
    return type(value).__name__ == "Tuple" and len(value) == 4 and str(value[0]) == "digits"


def _equal_digits(first: Any, second: Any) -> bool:
    """A number with a base equals another of the same value, and the same digits without a base."""
    if _is_digits(first) and _is_digits(second):
        return bool(first[1] == second[1])
    based, other = (first, second) if _is_digits(first) else (second, first)
    return _is_number(other) and (_equal_numbers(other, based[1]) or str(other) == str(based[3]))


def _evaluated(value: Any) -> Any:
    from sympy import Intersection, MatrixExpr, Union

    if isinstance(value, Union | Intersection):
        return value.func(*value.args)
    return value.doit() if isinstance(value, MatrixExpr) else value


def _items(value: Any) -> list[Any]:
    """Return the items of a tuple, a column, a set, or an open interval, which is written like a pair; else none."""
    from sympy import FiniteSet, Interval, MatrixBase, Tuple

    if isinstance(value, FiniteSet):
        return list(getattr(value, "_unsorted_args", value.args))
    if isinstance(value, Tuple):
        return list(value)
    if isinstance(value, MatrixBase):
        return list(value) if 1 in value.shape else []
    return [value.start, value.end] if isinstance(value, Interval) and value.left_open and value.right_open else []


def _is_equation(value: Any) -> bool:
    from sympy import Eq
    from sympy.logic.boolalg import And

    return isinstance(value, Eq) or (isinstance(value, And) and all(isinstance(part, Eq) for part in value.args))


def _right_side(value: Any) -> Any:
    """Return the value of an unknown: the right side of ``x = 5``, ``f(x) = 5`` or ``5 = x``; else the value itself."""
    from sympy import Tuple
    from sympy.core.function import AppliedUndef
    from sympy.logic.boolalg import And

    if not _is_equation(value):
        return value
    if isinstance(value, And):
        return list(getattr(value, "_unsorted_args", value.args))[-1].rhs
    for side, other in ((value.lhs, value.rhs), (value.rhs, value.lhs)):
        if getattr(side, "is_Symbol", False) or isinstance(side, AppliedUndef | Tuple):
            return other
    return value.rhs if _is_number(value.lhs) and _is_number(value.rhs) else value


def _equal_items(first: Sequence[Any], second: Sequence[Any]) -> bool:
    return len(first) == len(second) and all(_equal(item, other) for item, other in zip(first, second, strict=True))


def _equal_sets(first: list[Any], second: list[Any]) -> bool:
    if len(first) != len(second):
        return False
    remaining = list(second)
    for member in first:
        match = next((place for place, other in enumerate(remaining) if _equal(member, other)), None)
        if match is None:
            return False
        del remaining[match]
    return True


def _as_set(value: Any) -> Any:
    """Return the numbers for which an inequality with one unknown holds; None for everything else."""
    from sympy import Set
    from sympy.core.relational import Relational
    from sympy.logic.boolalg import And

    if isinstance(value, Set):
        return value
    if not isinstance(value, Relational | And) or len(value.free_symbols) != 1:
        return None
    try:
        return value.as_set()
    except (TypeError, ValueError, NotImplementedError):
        return None


def _equal_regions(first: Any, second: Any) -> bool:
    from sympy import Interval, Union

    unions = isinstance(first, Union) and isinstance(second, Union) and len(first.args) == len(second.args)
    if unions and all(isinstance(part, Interval) for part in (*first.args, *second.args)):
        return _equal_sets(list(first.args), list(second.args))
    if isinstance(first, Interval) and isinstance(second, Interval):
        return _equal(first, second)
    try:
        return bool(first.symmetric_difference(second).is_empty)
    except (TypeError, ValueError, NotImplementedError):
        return False


def _is_number(value: Any) -> bool:
    from sympy import Expr

    return isinstance(value, Expr) and not value.free_symbols and not _functions(value)


def _functions(value: Any) -> bool:
    from sympy.core.function import AppliedUndef

    return bool(value.has(AppliedUndef))


def _equal_numbers(first: Any, second: Any) -> bool:
    from sympy import Float

    decimals = first.has(Float) or second.has(Float)
    difference = _difference(first, second, _DIGITS)
    if not decimals:
        if difference is None or difference > 10.0 ** (8 - _DIGITS):
            return difference is not None and difference == 0
        again = _difference(first, second, _MANY_DIGITS)
        return again is not None and again <= Decimal(10) ** (20 - _MANY_DIGITS)
    if difference is None:
        return False
    rounding = max((half for half in map(_half_unit, (first, second)) if half <= PRECISION), default=0.0)
    return difference <= max(_ROUNDING, rounding)


def _difference(first: Any, second: Any, digits: int) -> Decimal | None:
    """Return the difference of two numbers relative to the second; None if one of them has no finite value."""
    values = [_value(expression, digits, {}) for expression in (first, second)]
    if None in values:
        return Decimal(0) if first == second else None
    return _relative(values[0], values[1])


def _relative(first: Any, second: Any) -> Decimal | None:
    if first.is_zero or second.is_zero:
        return Decimal(0) if first.is_zero and second.is_zero else Decimal(1)
    from sympy import Abs

    return Decimal(str(Abs(first - second).n(15))) / Decimal(str(max(Abs(first), Abs(second)).n(15)))


def _value(expression: Any, digits: int, at: dict[Any, Any]) -> Any:
    """Return the value in ``digits`` significant digits; 0 if nothing of it is certain; None if there is none."""
    from sympy import Expr, Float, I, Integer

    try:
        value = expression.evalf(digits, subs=at, maxn=max(400, digits * 2))
        if not value.is_number or (value.atoms(Float) == set() and not value.is_Number):
            value = expression.subs(at).doit().evalf(digits)
        real, imaginary = value.as_real_imag()
    except (TypeError, ValueError, AttributeError, ArithmeticError, NotImplementedError):
        return None
    if not (
        isinstance(real, Expr) and real.is_Number and imaginary.is_Number and real.is_finite and imaginary.is_finite
    ):
        return None
    certain = [part if not isinstance(part, Float) or part._prec > 8 else Integer(0) for part in (real, imaginary)]
    return certain[0] if certain[1].is_zero else certain[0] + I * certain[1]


def _half_unit(value: Any) -> float:
    """Return half a unit of the last digit of a decimal, also of one times powers, relative to it; 1.0 for others."""
    from mpmath.libmp.libmpf import prec_to_dps
    from sympy import Float

    factors = value.args if value.is_Mul else (value,)
    floats = [factor for factor in factors if isinstance(factor, Float)]
    if len(floats) != 1 or any(factor.has(Float) for factor in factors if factor is not floats[0]):
        return 1.0
    places = prec_to_dps(floats[0]._prec) - _STORED
    return float(0.5 / abs(floats[0] * 10**places)) if not floats[0].is_zero else 1.0


def _without_functions(value: Any) -> Any:
    """Return an expression with a symbol for each unknown function and derivative, such as ``x(t)``."""
    from sympy import Derivative, Symbol, evaluate
    from sympy.core.function import AppliedUndef

    unknown = value.atoms(AppliedUndef, Derivative)
    if not unknown:
        return value
    with evaluate(False):
        return value.xreplace({function: Symbol(f"{function}", real=True) for function in unknown})


_POINTS = ((7, 5), (-13, 9), (31, 4), (-2, 11))


def _equal_everywhere(first: Any, second: Any) -> bool:
    from sympy import Float, Symbol

    first, second = _without_functions(first), _without_functions(second)
    if isinstance(first, Symbol) and isinstance(second, Symbol):
        return bool(first == second)
    tolerance = _ROUNDING if first.has(Float) or second.has(Float) else 1e-20
    differences = [_relative(*values) for values in _values(first, second)]
    if len(differences) < 2:
        return _verified(first, second)
    return all(difference is not None and difference <= tolerance for difference in differences)


def _values(first: Any, second: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the values of two expressions at each point at which they have one."""
    from sympy import Integer, Rational

    symbols = sorted(first.free_symbols | second.free_symbols, key=str)
    positive = _positive(first, second)
    # The points are on no common line: on one, y - 2x and y - 3x have a constant ratio.
    for number, (numerator, denominator) in enumerate(_POINTS):
        at = {
            # Names of whole numbers get whole numbers, for factorials and (-1)^n.
            symbol: Integer(2 + (3 * number + place) % 11)
            if str(symbol) in {"n", "k", "m"}
            else Rational(
                (abs(numerator) if symbol in positive else numerator) * (17 + 4 * place + 3 * number * place**2 % 13),
                denominator * (19 + 2 * place),
            )
            for place, symbol in enumerate(symbols)
        }
        values = _value(first, 30, at), _value(second, 30, at)
        if None not in values:
            yield values


def _positive(first: Any, second: Any) -> set[Any]:
    """Return the unknowns that are positive wherever both expressions are defined: those of logarithms and in roots.

    The root of x is defined for positive x, the root of x squared for all."""
    from sympy import Abs, Pow, log

    logarithms = first.atoms(log) | second.atoms(log)
    symbols = set().union(
        *(logarithm.free_symbols for logarithm in logarithms if not any(other.has(Abs) for other in logarithms))
    )
    for root in first.atoms(Pow) | second.atoms(Pow):
        base = root.base.as_independent(*root.base.free_symbols, as_Add=False)[1]
        if root.exp.is_Rational and root.exp.q % 2 == 0 and base.is_Symbol and (root.base / base).is_positive:
            symbols.add(base)
    return symbols


def _equal_relations(first: Any, second: Any) -> bool:
    """Two equations are equal if the differences of their sides have a constant ratio; it is positive for ``<``."""
    from sympy import Eq, Gt, Lt, Ne
    from sympy.core.relational import GreaterThan, LessThan

    both = isinstance(first, Eq) and isinstance(second, Eq) and first.lhs.is_Symbol and first.lhs == second.lhs
    if both and _equal(first.rhs, second.rhs):
        return True
    sides = [
        (relation.rhs, relation.lhs) if isinstance(relation, Gt | GreaterThan) else (relation.lhs, relation.rhs)
        for relation in (first, second)
    ]
    kinds = [
        next(
            place for place, kind in enumerate((Eq, Ne, Lt | Gt, LessThan | GreaterThan)) if isinstance(relation, kind)
        )
        for relation in (first, second)
    ]
    if kinds[0] != kinds[1] or not all(
        hasattr(side, "evalf") and side.is_commutative for pair in sides for side in pair
    ):
        return kinds[0] == kinds[1] and _verified(first, second)
    ratios = []
    from sympy import Add, Mul

    first_side, second_side = (
        Add(relation, Mul(-1, other, evaluate=False), evaluate=False) for relation, other in sides
    )
    for value, other in _values(_without_functions(first_side), _without_functions(second_side)):
        if value.is_zero or other.is_zero:
            if not (value.is_zero and other.is_zero):
                return False
            continue
        ratios.append(value / other)
    if len(ratios) < 2:
        return False
    constant = all((_relative(relation, ratios[0]) or 0) <= _ROUNDING for relation in ratios)
    return constant and (kinds[0] < 2 or bool(ratios[0] > 0))


def _verified(first: Any, second: Any) -> bool:
    """Return the verdict of math-verify on two expressions."""
    import math_verify

    # Its time limits use signals, which work only in a main thread; the reward's process has a limit anyway.
    return bool(math_verify.verify(first, second, timeout_seconds=None))
