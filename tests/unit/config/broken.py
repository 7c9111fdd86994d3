"""The mistakes that the settings of a command line are."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from slime_core.config.check import mistakes
from slime_core.config.load import load
from slime_core.errors import ConfigError, Mistake


def broken(line: str, purpose: str = "run") -> list[Mistake]:
    """Return the rules between settings that the command line breaks."""
    config = load(["--advantage-estimator", "toy", *line.split()], check_rules=False).config
    return mistakes(config, purpose=purpose)


def blames(found: Sequence[Mistake], key: str, *names: str) -> None:
    """Assert that there is one mistake, of this setting, that has ``names`` in its message, in this order."""
    (mistake,) = found
    assert mistake.key == key
    assert re.search(".*".join(map(re.escape, names)), str(mistake), re.DOTALL), mistake


def refused(*argv: str, **options: object) -> list[Mistake]:
    """Return the mistakes for which the command line is refused, rules between settings aside."""
    with pytest.raises(ConfigError) as caught:
        load(argv, check_rules=False, **options)  # type: ignore[arg-type]
    return list(caught.value.mistakes)


def described(folder: Path, **values: object) -> str:
    """Return words that name a model of these values."""
    (folder / "config.json").write_text(json.dumps({"architectures": ["X"], **values}))
    return f"--hf-checkpoint {folder} --rollout-max-response-len 8"
