"""Samples as HTML: tokens coloured by log-probability, advantage or weight version, with the values on hover."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from safetensors.numpy import load_file
from tokenizers import Tokenizer

from slime_plots.tokens import Tokens, shown

__all__ = ["STYLE", "advantages", "coloured"]

STYLE = """
.tokens { white-space: pre-wrap; overflow-wrap: anywhere; font-family: monospace; line-height: 1.7; }
.tokens span { border-radius: 2px; }
.tokens .prompt { color: #06667a; }
.tokens .masked { color: #777; text-decoration: underline dotted; }
.samples:has(.by-log-prob:checked) .tokens span { background: var(--log-prob); }
.samples:has(.by-advantage:checked) .tokens span { background: var(--advantage); }
.samples:has(.by-version:checked) .tokens span { background: var(--version); }
"""


def advantages(template: str, rollout: int) -> Mapping[int, Sequence[float]]:
    """Return sample index -> advantage of each response token; NaN if the learner did not train the token.

    Arguments:
        template: the run's ``--save-debug-train-data``, the path of the files with the advantages.
    """
    file = Path(template.replace("{rollout_id}", f"{rollout}").replace("{rank}", "*"))
    per_sample: dict[int, Sequence[float]] = {}
    for part in sorted(file.parent.glob(file.name)):
        columns = load_file(part)
        start = 0
        for index, length in zip(columns["indices_B"].tolist(), columns["response_lengths_B"].tolist(), strict=True):
            values = columns["trained/advantages_U"][start : start + length].tolist()
            earlier = per_sample.get(index, values)
            # Context-parallel ranks have parts of a response, NaN elsewhere.
            per_sample[index] = [
                value if math.isnan(other) else other for value, other in zip(values, earlier, strict=True)
            ]
            start += length
    return per_sample


def coloured(
    sample: Tokens, tokenizer: Tokenizer | None, advantages: Sequence[float] | None = None, *, largest: float = 1.0
) -> str:
    """Return the sample as HTML: title, prompt, response. Text of models and data is escaped.

    Arguments:
        advantages: one for each response token; NaN: not trained. None: unknown.
        largest: absolute advantage with the strongest colour.
    """
    prompt = escape("".join(shown(token, tokenizer) for token in sample.prompt))
    tokens = []
    for place, (token, trains, log_prob) in enumerate(sample.response):
        advantage = None if advantages is None or math.isnan(advantages[place]) else advantages[place]
        version = sample.versions[place] if sample.versions else None
        colours = {
            "log-prob": None if log_prob is None else _hue(120 * math.exp(log_prob / 2)),
            "advantage": None if advantage is None else _signed(advantage / largest),
            "version": None if version is None else _hue(_turn(version)),
        }
        style = ";".join(f"--{name}:{colour}" for name, colour in colours.items() if colour is not None)
        facts = {"id": token, "log-prob": _number(log_prob), "advantage": _number(advantage), "version": version}
        title = escape(" · ".join(f"{name} {value}" for name, value in facts.items() if value is not None))
        name, note = ("", "") if trains else ("masked", " · not trained")
        tokens.append(
            f'<span class="{name}" style="{style}" title="{title}{note}">{escape(shown(token, tokenizer))}</span>'
        )
    heading = f"<h4>{escape(sample.title)}</h4>"
    return f'{heading}<div class="tokens"><span class="prompt">{prompt}</span>{"".join(tokens)}</div>'


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.4g}"


def _hue(degrees: float) -> str:
    red, green, blue = (round(255 * part) for part in colorsys.hls_to_rgb(degrees / 360, 0.82, 0.75))
    return f"#{red:02x}{green:02x}{blue:02x}"


def _signed(share: float) -> str:
    """Return a colour from red for -1 over white for 0 to blue for 1."""
    pale = round(255 * (1 - 0.6 * abs(share)))
    return f"#{pale:02x}{pale:02x}ff" if share >= 0 else f"#ff{pale:02x}{pale:02x}"


def _turn(version: str) -> float:
    """Return a hue in degrees; steps of the golden angle keep adjacent versions far apart."""
    number = int(version) if version.isdigit() else sum(version.encode())
    return number * 137.508 % 360
