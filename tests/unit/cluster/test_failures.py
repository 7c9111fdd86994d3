"""Errors of constructors as text."""

from __future__ import annotations

import base64
import pickle

from slime_core.cluster.failures import SealedError
from slime_core.errors import ConfigError, EngineError, SlimeError


class PluginsOwn(EngineError):
    """Known to one plugin only."""


def test_a_sealed_error_keeps_its_class_and_message() -> None:
    sealed = SealedError.seal(ConfigError("lr is 'minus' \"one\"\n\u00e9"))
    opened = SealedError.open(f"The actor died: '{sealed}' and so on")
    assert type(opened) is ConfigError
    assert str(opened) == "lr is 'minus' \"one\"\n\u00e9"


def test_an_error_of_a_plugin_becomes_its_nearest_known_ancestor() -> None:
    opened = SealedError.open(str(SealedError.seal(PluginsOwn("out of tape"))))
    assert type(opened) is EngineError
    assert str(opened) == "out of tape"


def test_text_without_a_seal_holds_no_error() -> None:
    assert SealedError.open("The actor died.") is None


def test_nothing_but_a_name_and_a_message_is_opened() -> None:
    def sealed(content: bytes) -> SlimeError | None:
        return SealedError.open(f"slime-error:{base64.b64encode(content).decode()}")

    assert sealed(pickle.dumps(ConfigError("pickled"))) is None
    assert sealed(b'["SystemExit", "7"]') is None
    assert sealed(b'{"ConfigError": 1}') is None
    assert SealedError.open("slime-error:abc") is None
