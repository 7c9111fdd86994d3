"""``slime convert``: converts checkpoints between Hugging Face and torch_dist, and compares two of them."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core.errors import ConfigError, SlimeError

if TYPE_CHECKING:
    from slime_convert.conversion import Conversion

__all__ = ["main"]

HF, TORCH_DIST, VERIFY = "hf-to-torch-dist", "torch-dist-to-hf", "verify"

OVERVIEW = f"""\
slime convert {HF} --hf-checkpoint FOLDER --save FOLDER
slime convert {TORCH_DIST} --input-dir FOLDER --output-dir FOLDER
slime convert {VERIFY} A B    exit code 1 if a weight differs; A and B: Hugging Face, torch_dist, or runs

Several processes: torchrun --nproc-per-node 4 -m slime_core convert ...
slime convert COMMAND --help shows every option; docs/checkpoints.md has examples."""

SHOWN = 20
"""Limit on printed differences."""

REPORT_S = 30
"""Seconds that the other ranks wait for rank 0 to report an error that all of them found."""

REFRESH_S = 0.1
"""Seconds between two updates of the progress bar."""


def main(argv: Sequence[str]) -> int:
    """Run one conversion and return the exit code.

    Raises:
        ConfigError: the arguments name no conversion.
        SlimeError: the conversion failed.
    """
    if not argv or argv[0] in ("--help", "-h"):
        print(OVERVIEW)
        return 0
    if argv[0] not in _COMMANDS:
        raise ConfigError(f"slime convert {argv[0]}; accepted: {', '.join(_COMMANDS)}\n{OVERVIEW}")
    add_arguments, run = _COMMANDS[argv[0]]
    parser = argparse.ArgumentParser(prog=f"slime convert {argv[0]}", allow_abbrev=False)
    add_arguments(parser)
    parser.add_argument(
        "--plugin", action="append", default=[], help="a plugin to use, such as one with another model family"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run the checkpoint's own Python code")
    arguments = parser.parse_args(argv[1:])
    rank = int(os.environ.get("RANK", "0"))
    # torchrun sends it when another rank fails; exiting removes the draft
    before = signal.signal(signal.SIGTERM, _exit)
    _use_the_cpu()
    try:
        return run(arguments)
    except SlimeError:
        if rank > 0:
            time.sleep(
                REPORT_S
            )  # all ranks find most errors; torchrun ends this one after rank 0 has printed its error
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _use_the_cpu() -> None:
    """Hide the GPUs: a conversion only copies and splits weights, and a run may need their memory."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from slime_core.modeling import prepare_megatron

    prepare_megatron()
    warnings.filterwarnings("ignore", "Transformer Engine and Apex are not installed", UserWarning)


def _exit(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _to_torch_dist_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hf-checkpoint", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--save", type=Path, required=True, help="torch_dist folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing checkpoint")
    for axis in ("tensor", "pipeline", "expert"):
        parser.add_argument(
            f"--{axis}-model-parallel-size",
            type=int,
            help=f"{axis}-parallel size while converting; the folder loads in any layout. Default: one pipeline stage "
            "per process",
        )


def _to_torch_dist(arguments: argparse.Namespace) -> int:
    from slime_convert.conversion import to_torch_dist

    with _converting(arguments) as how:
        left_out = to_torch_dist(arguments.hf_checkpoint, arguments.save, how)
    if left_out and os.environ.get("RANK", "0") == "0":
        print(f"left out, because the model has no place for them: {len(left_out)} weights, such as {left_out[0]}")
    return _done(arguments.save)


def _to_hugging_face_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input-dir", type=Path, required=True, help="torch_dist folder, run, or checkpoint of a run")
    parser.add_argument("--output-dir", type=Path, required=True, help="Hugging Face folder to write")
    parser.add_argument("--overwrite", "-f", action="store_true", help="replace an existing checkpoint")
    parser.add_argument(
        "--origin-hf-dir", type=Path, help="folder with config.json and tokenizer; default: the copy in the input"
    )
    parser.add_argument(
        "--vocab-size", type=int, help="rows of the embedding without padding; default: that of config.json"
    )


def _to_hugging_face(arguments: argparse.Namespace) -> int:
    from slime_convert.conversion import to_hugging_face

    with _converting(arguments) as how:
        to_hugging_face(
            arguments.input_dir,
            arguments.output_dir,
            how,
            origin=arguments.origin_hf_dir,
            vocab_size=arguments.vocab_size,
        )
    return _done(arguments.output_dir)


def _verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=Path, metavar="A")
    parser.add_argument("b", type=Path, metavar="B")
    parser.add_argument("--origin-hf-dir", type=Path, help="config of a torch_dist folder that carries none")


def _verify(arguments: argparse.Namespace) -> int:
    from slime_convert.conversion import verify

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("slime convert verify compares in one process; start it without torchrun")
    with _converting(arguments) as how:
        differences = verify(arguments.a, arguments.b, how, origin=arguments.origin_hf_dir)
    if not differences:
        print(f"{arguments.a} and {arguments.b} hold the same weights, to the bit")
        return 0
    print(f"{arguments.a} and {arguments.b} differ:")
    print("\n".join(f"  {text}" for text in differences[:SHOWN]))
    if len(differences) > SHOWN:
        print(f"  and {len(differences) - SHOWN} more")
    return 1


_COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]] = {
    HF: (_to_torch_dist_arguments, _to_torch_dist),
    TORCH_DIST: (_to_hugging_face_arguments, _to_hugging_face),
    VERIFY: (_verify_arguments, _verify),
}


def _done(target: Path) -> int:
    if os.environ.get("RANK", "0") == "0":
        print(f"written: {target}")
    return 0


@contextmanager
def _converting(arguments: argparse.Namespace) -> Iterator[Conversion]:
    """The arguments of the conversion, with a progress bar on a terminal."""
    from slime_convert.conversion import Conversion
    from slime_core.modeling import ParallelLayout

    axes = {axis: getattr(arguments, f"{axis}_model_parallel_size", None) for axis in ("tensor", "pipeline", "expert")}
    sizes = {axis: size for axis, size in axes.items() if size is not None}
    layout = None
    if sizes:
        world = int(os.environ.get("WORLD_SIZE", "1"))
        layout = ParallelLayout(**sizes, sequence=sizes.get("tensor", 1) > 1)
        layout.data_size(world)
    with _bar() as progress:
        yield Conversion(
            overwrites=getattr(arguments, "overwrite", False),
            plugins=tuple(arguments.plugin),
            trust_remote_code=arguments.trust_remote_code,
            layout=layout,
            progress=progress,
        )


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal; elsewhere nothing is printed."""
    if not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0":
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    last = 0.0
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("converting", total=None)

        def show(done: int, total: int) -> None:
            nonlocal last
            if done == total or time.monotonic() - last > REFRESH_S:
                last = time.monotonic()
                bar.update(task, completed=done, total=total)

        yield show
