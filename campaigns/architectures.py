"""Prints the table of architectures that slime-transformers trains, from tiny random models.

    python -m campaigns.architectures [--without-engines] [ARCHITECTURE ...]

For each architecture: how the learner computes a row, the difference of its gradients from those of transformers,
whether exported weights equal the file, and the largest difference of SGLang's log-probabilities on a CPU, with windows
that are longer than the sample and with windows of 6 tokens. If an engine does not start, its error.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from slime_core import RunView
from slime_core.config.schema import ARITHMETIC
from slime_core.errors import SlimeError
from slime_testing.harness.engines import real_engine
from slime_testing.harness.megatron import start_single_rank
from tests.engines.families import packed_logits
from tests.engines.transformers_models import ARCHITECTURES, SIZES, write

LENGTHS = (5, 1, 17, 8)
TOKENS = 20
"""Tokens of the sample whose log-probabilities engine and transformers compute."""

WIDE = 64
"""A window that has room for all of these tokens."""


def main(words: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", metavar="ARCHITECTURE", help="default: all")
    parser.add_argument("--without-engines", action="store_true")
    arguments = parser.parse_args(words)
    layout = start_single_rank()
    print("| architecture | rows | gradient | exported | SGLang on a CPU, log-probabilities |\n|---|---|---|---|---|")
    for name in arguments.architectures or ARCHITECTURES:
        with tempfile.TemporaryDirectory() as folder:
            learner = _learner_cells(name, Path(folder), layout)
            engine = "" if arguments.without_engines else _engine_cell(name, Path(folder))
        print(f"| {' | '.join([name.removesuffix('ForCausalLM'), *learner, engine])} |", flush=True)


def _learner_cells(name: str, folder: Path, layout: Any) -> tuple[str, str, str]:
    from slime_transformers.spec import Transformers

    model = write(name, folder)
    spec = Transformers(RunView(model_folder=folder))
    chunks = spec.build(json.loads((folder / "config.json").read_text()), dtype=torch.float32, parallel=layout)
    spec.load_weights(chunks, folder)
    chunk: Any = chunks[0]
    stored, exported = load_file(folder / "model.safetensors"), dict(spec.export_weights(chunks))
    equal = stored.keys() == exported.keys() and all(torch.equal(stored[key], exported[key]) for key in stored)
    rows = [_tokens(length, seed=length) for length in LENGTHS]
    _log_probs(packed_logits(chunk, rows), rows).mean().backward()
    _log_probs(torch.cat([model(row[None]).logits[0] for row in rows]), rows).mean().backward()
    ours = {key: tensor.grad for key, tensor in chunk.named_tensors() if tensor.requires_grad}
    pairs = [(ours[key], parameter.grad) for key, parameter in model.named_parameters() if parameter.grad is not None]
    expected = torch.cat([gradient.flatten() for _, gradient in pairs])
    difference = (torch.cat([gradient.flatten() for gradient, _ in pairs]) - expected).norm() / expected.norm()
    kind = "packed" if chunk.shares_prompts else "one sample at a time"
    return kind, f"{difference:.0e}", "bit for bit" if equal else "no"


def _engine_cell(name: str, folder: Path) -> str:
    difference = _engine_difference(name, folder / "wide", sliding_window=WIDE)
    has_windows = "sliding_window" in json.loads((folder / "config.json").read_text())
    if isinstance(difference, str) or not has_windows:
        return difference if isinstance(difference, str) else f"{difference:.0e}"
    narrow = _engine_difference(name, folder / "narrow")
    return f"{difference:.0e}; with windows {narrow if isinstance(narrow, str) else f'{narrow:.0e}'}"


def _engine_difference(name: str, folder: Path, **changes: Any) -> float | str:
    import transformers

    known = getattr(transformers, name).config_class().to_dict()
    model = write(name, folder, **{key: value for key, value in changes.items() if key in known})
    for file in (ARITHMETIC / "model").iterdir():
        if file.name not in ("config.json", "model.safetensors", "generation_config.json"):
            shutil.copy(file, folder / file.name)
    tokens = _tokens(TOKENS, seed=0)
    with torch.no_grad():
        expected = _log_probs(model(tokens[None]).logits[0], [tokens])[:-1]
    try:
        with real_engine(folder, logs=folder, dtype="float32") as url:
            return float((_engine_log_probs(url, tokens) - expected).abs().max())
    except SlimeError as problem:
        lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
        causes = [line for line in lines if re.match(r"\w+Error: ", line)]
        return f"no: {(causes or lines)[-1]}".replace("|", "/")[:200]


def _engine_log_probs(url: str, tokens: torch.Tensor) -> torch.Tensor:
    asked = {
        "input_ids": tokens.tolist(),
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    request = urllib.request.Request(
        f"{url}/generate", json.dumps(asked).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        entries = json.load(answer)["meta_info"]["input_token_logprobs"]
    return torch.tensor([entry[0] for entry in entries[1:]])


def _tokens(count: int, *, seed: int) -> torch.Tensor:
    return torch.randint(0, SIZES["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed))


def _log_probs(logits_TV: torch.Tensor, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return logits_TV.log_softmax(-1).gather(1, torch.cat(list(rows)).roll(-1)[:, None])[:, 0]


if __name__ == "__main__":
    main()
