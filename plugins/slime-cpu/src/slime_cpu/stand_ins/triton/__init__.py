"""Stands in for triton on a server without a GPU: kernels can be defined and never launched.

SGLang 0.5.23 imports triton in some 400 files, whatever the device. Goes when triton ships a CPU wheel or SGLang imports it lazily.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from _slime_stand_in import serve

__version__ = "3.7.0"  # what SGLang 0.5.23 is built against
__getattr__ = serve(__name__)


def jit(kernel: Any = None, **_: Any) -> Any:
    """The kernel as the plain function it was written as; ``@jit`` and ``@jit(...)``."""
    return jit if kernel is None else kernel


def autotune(*_: Any, **__: Any) -> Callable[[Any], Any]:
    """The kernel unchanged."""
    return jit


heuristics = autotune


def cdiv(numerator: int, denominator: int) -> int:
    """The quotient, rounded up."""
    return -(-numerator // denominator)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least ``number``, and 0 for numbers below 1."""
    return 1 << (number - 1).bit_length() if number > 0 else 0


def constexpr(value: Any) -> Any:
    """The value itself: ``triton.language.constexpr``, which modules also call at import."""
    return value


language: Any = __getattr__("language")
language.constexpr = constexpr
