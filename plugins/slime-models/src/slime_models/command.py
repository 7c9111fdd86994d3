"""The command ``slime models``: lists and describes presets, and identifies checkpoints. Imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from slime_core.errors import ConfigError
from slime_core.modeling.memory import GIB, SHARE, ModelSize, Training, Usage, layouts
from slime_models.arguments import arguments
from slime_models.checkpoint import config_of_folder
from slime_models.count import Counts, Parameters, count
from slime_models.families import ALL, Preset, presets
from slime_models.recognise import disagreements, find, recognise
from slime_models.shape import Shape, config_of

__all__ = ["main"]

EPILOG = """examples:
  slime models list
  slime models show qwen3-4B
  MODEL_ARGS=($(slime models show qwen3-4B --format args)); slime run "${MODEL_ARGS[@]}" ...
  slime models show qwen3-30B-A3B --gpus 8 --gpu-memory-gib 80
  slime models match checkpoints/Qwen3-4B
"""


def main(argv: Sequence[str]) -> int:
    """Run ``slime models ...``; return the exit code.

    Raises:
        ConfigError: a preset or an architecture is unknown, or a folder has no ``config.json``.
    """
    options = _parser().parse_args(argv)
    lines: Iterator[str] = options.run(options)
    print("\n".join(lines))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slime models",
        description="Presets of models: their sizes, their Megatron arguments, the memory that training takes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="every preset, with its parameters", allow_abbrev=False)
    listing.add_argument("--sources", action="store_true", help="a Markdown table with the published figures")
    listing.set_defaults(run=_list)
    show = commands.add_parser("show", help="one preset", allow_abbrev=False)
    show.add_argument("name", metavar="NAME", help="as slime models list prints it")
    show.add_argument("--format", choices=("text", "args", "toml"), default="text", help="args: for launch scripts")
    show.add_argument("--gpus", type=int, metavar="N", help="print the layouts that fit on N GPUs, the best first")
    show.add_argument("--gpu-memory-gib", type=float, metavar="M", help="memory of one of them")
    show.add_argument("--tokens", type=int, default=8192, metavar="T", help="of one micro-batch [8192]")
    show.set_defaults(run=_show)
    match = commands.add_parser("match", help="which family and preset a checkpoint is", allow_abbrev=False)
    match.add_argument("folder", metavar="DIR", type=Path, help="a Hugging Face folder")
    match.set_defaults(run=_match)
    return parser


def _list(options: argparse.Namespace) -> Iterator[str]:
    if options.sources:
        yield from _sources()
        return
    rows = [("name", "parameters", "active", "family", "checkpoint")]
    for family in ALL:
        for preset in family.presets:
            counted = count(preset.shape)
            sizes = _billions(counted.total), _billions(counted.active)
            rows.append((preset.name, *sizes, family.title, preset.checkpoint))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


HEAD = "tensor  pipeline  expert (tensor)  data  recompute"

COUNTS: Mapping[Counts, str] = {
    "all": "",
    "without_embeddings": ", without embeddings",
    "next_token": ", without embeddings, with prediction layers",
}


def _sources() -> Iterator[str]:
    yield "| preset | parameters | active | as published | published | numbers in the files | source |"
    yield "|---|---|---|---|---|---|---|"
    for preset in presets().values():
        counted, published = count(preset.shape), preset.published
        both = dict.fromkeys(counted.published(published.counts))
        counts = "; active ".join(map(_billions, both))
        stated = f"{published.total:.{published.digits}f}B"
        if published.active is not None:
            stated += f"; active {published.active:.{published.digits}f}B"
        files = "" if published.stored is None else f"{published.stored:,}"
        source = published.source or f"model card of {preset.checkpoint}"
        cells = (
            preset.name,
            f"{counted.total:,}",
            f"{counted.active:,}",
            counts + COUNTS[published.counts],
            stated,
            files,
        )
        yield f"| {' | '.join(cells)} | {source} |"


def _billions(number: int) -> str:
    return f"{number / 1e9:.2f}B"


# --- One preset -------------------------------------------------------------------------------------------------------


def _show(options: argparse.Namespace) -> Iterator[str]:
    preset = find(options.name)
    if (options.gpus is None) != (options.gpu_memory_gib is None):
        raise ConfigError("--gpus and --gpu-memory-gib belong together: give both.")
    if options.gpus is not None:
        yield from _plan(preset, options.gpus, options.gpu_memory_gib, options.tokens)
    elif options.format == "args":
        yield from (f"--{name}" if value is None else f"--{name} {value}" for name, value in arguments(preset.shape))
    elif options.format == "toml":
        yield "[megatron]"
        yield from (f"{name.replace('-', '_')} = {_toml(value)}" for name, value in arguments(preset.shape))
    else:
        yield from _text(preset)


def _toml(value: str | int | float | None) -> str:
    return "true" if value is None else f'"{value}"' if isinstance(value, str) else str(value)


def _text(preset: Preset) -> Iterator[str]:
    counted = count(preset.shape)
    yield f"{preset.name}: {preset.checkpoint}"
    yield f"architecture {preset.shape.architecture}, model_type {preset.shape.model_type}"
    yield ""
    yield from _parameters(counted)
    yield ""
    for name, value in config_of(preset.shape).items():
        if name not in ("architectures", "model_type"):
            yield f"{name:<28}{value}"


def _parameters(counted: Parameters) -> Iterator[str]:
    parts = {
        "parameters": counted.total,
        "  active per token": counted.active,
        "  embedding": counted.embedding,
        "  output weights": counted.output,
        "  attention, norms, MLPs": counted.dense,
        "  routed experts": counted.experts,
        "not built: multi-token prediction": counted.next_token,
    }
    for name, number in parts.items():
        if number:
            yield f"{name:<34}{number:>22,}"


def _plan(preset: Preset, gpus: int, memory_gib: float, tokens: int) -> Iterator[str]:
    if gpus < 1 or (gpus > 8 and gpus % 8) or not 0 < memory_gib < 1e4 or tokens < 1:
        raise ConfigError(
            f"--gpus {gpus} --gpu-memory-gib {memory_gib:g} --tokens {tokens}; accepted: 1 to 8 GPUs or a multiple of "
            "8, memory in GiB above 0, at least 1 token."
        )
    usages = layouts(size_of(preset.shape), gpus, memory_gib, Training(tokens=tokens))
    if not usages:
        raise ConfigError(
            f"No layout of {preset.name} fits on {gpus} GPUs of {memory_gib:g} GiB with {tokens} tokens per "
            "micro-batch. Take more GPUs, or fewer --tokens."
        )
    limit = memory_gib * SHARE
    yield (
        f"{preset.name} on {gpus} GPUs of {memory_gib:g} GiB, {tokens} tokens per micro-batch; at most {limit:.1f} GiB:"
    )
    yield ""
    yield f"{HEAD} | weights  gradients  optimizer  activations  logits   total  GiB a GPU"
    yield from (_row(usage) for usage in usages[:5])
    yield ""
    yield "The best:"
    yield usages[0].cut.flags


def size_of(shape: Shape) -> ModelSize:
    """Return the sizes on which the memory of a model of this shape depends."""
    counted = count(shape)
    return ModelSize.of(
        config_of(shape),
        has_dense_layers=shape.dense_layers > 0,
        embedding=counted.embedding,
        output=counted.output,
        routed=counted.experts,
        dense=counted.dense,
    )


def _row(usage: Usage) -> str:
    layout = usage.cut.layout
    expert = f"{layout.expert} ({layout.expert_tensor})"
    sizes = f"{layout.tensor:>6}  {layout.pipeline:>8}  {expert:>15}  {usage.cut.data:>4}  {usage.cut.recompute:>9} |"
    widths = (8, 11, 11, 13, 8, 8)
    return sizes + "".join(
        f"{size / GIB:>{width}.1f}" for size, width in zip((*usage.parts.values(), usage.total), widths, strict=True)
    )


# --- A checkpoint -----------------------------------------------------------------------------------------------------


def _match(options: argparse.Namespace) -> Iterator[str]:
    config = config_of_folder(options.folder)
    match = recognise(config)
    yield f"family: {' or '.join(family.title for family in match.families)}"
    yield f"presets: {', '.join(preset.name for preset in match.presets) or 'none'}"
    if match.nearest is not None:
        yield f"nearest: {match.nearest.name}, which differs in:"
        yield from (f"  {difference}" for difference in disagreements(match.nearest, config))
    yield from _size(match.shape)


def _size(shape: Shape) -> Iterator[str]:
    yield ""
    yield from _parameters(count(shape))
