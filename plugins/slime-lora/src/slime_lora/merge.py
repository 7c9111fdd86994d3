"""Merges adapters into weights: for engines, and by the command ``slime convert lora-merge``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core.errors import ConfigError, SlimeError
from slime_core.weights import HuggingFaceFolder, weight_files

if TYPE_CHECKING:
    import torch

__all__ = ["WEIGHT", "main", "merge"]

WEIGHT = ".weight"
"""End of the name of a linear layer's weight, after its module."""

EPILOG = """example:
  slime convert lora-merge outputs/run/checkpoints/step-000080/hf merged

The folder merged then holds a model that transformers and SGLang load."""


def merge(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, scale: float) -> torch.Tensor:
    """Return ``weight + scale * b a``, added in float32, in the dtype of ``weight``.

    Arguments:
        weight: [out, in].
        a: [rank, in].
        b: [out, rank].
    """
    return (weight.float() + scale * (b.float() @ a.float())).to(weight.dtype)


def main(words: Sequence[str]) -> int:
    """Run ``slime convert lora-merge``; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="slime convert lora-merge",
        description="Write a Hugging Face folder with the adapters of a folder of peft merged into its base model.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("adapter", metavar="ADAPTER", type=Path, help="folder of peft, such as a checkpoint's hf")
    parser.add_argument("output", metavar="OUTPUT", type=Path, help="folder to create")
    parser.add_argument(
        "--hf-checkpoint", metavar="FOLDER", type=Path, help="the base model [the folder that ADAPTER names]"
    )
    options = parser.parse_args(words)
    merge_folder(options.adapter, options.output, base=options.hf_checkpoint)
    print(f"wrote {options.output}")
    return 0


def merge_folder(adapter: Path, output: Path, *, base: Path | None = None) -> None:
    """Write the merged model into the folder ``output``, which is created.

    Arguments:
        adapter: folder in peft's format.
        base: Hugging Face folder of the base model; None: the one that ``adapter`` names.

    Raises:
        ConfigError: a folder cannot be read or exists already, or the adapter is of another model.
    """
    from slime_lora import folder

    config, tensors = folder.load(adapter)
    base = base or Path(str(config.base))
    if not (base / "config.json").is_file():
        raise ConfigError(f"{base}, the base model of {adapter}, is no Hugging Face folder; give --hf-checkpoint")
    if output.exists():
        raise ConfigError(f"{output} exists; give a folder that does not")
    remaining = dict(tensors)
    try:
        written = HuggingFaceFolder(output)
        for name, weight in _weights(base):
            module = name.removesuffix(WEIGHT)
            if f"{module}.A" in remaining and f"{module}.B" in remaining:
                a, b = remaining.pop(f"{module}.A"), remaining.pop(f"{module}.B")
                _require_shapes(adapter, module, weight, a, b)
                weight = merge(weight, a, b, scale=config.scale)
            written.add({name: weight})
        if remaining:
            raise ConfigError(f"{adapter} has adapters of modules that {base} lacks: {sorted(remaining)[:3]}")
        written.finish(template=base)
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error}") from error
    except SlimeError:
        _remove(output)
        raise


def _weights(base: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    for file in weight_files(base):
        with safe_open(file, framework="pt") as content:
            for name in content.keys():  # noqa: SIM118 (it is not a mapping)
                yield name, content.get_tensor(name)


def _require_shapes(adapter: Path, module: str, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    if (b.size(0), a.size(1)) != tuple(weight.shape) or b.size(1) != a.size(0):
        raise ConfigError(f"{adapter}: the adapter of {module} does not fit a weight of shape {list(weight.shape)}")


def _remove(output: Path) -> None:
    import shutil

    shutil.rmtree(output, ignore_errors=True)
