"""The conversions, and the comparison of two checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime_convert.formats import HuggingFaceWeights, Shapes, carried_folder, compare, config_of, read_object
from slime_convert.model import ConvertedModel, TorchDistWeights, gather, on_first, parallel_groups, world_size
from slime_core.checkpoint import CARRIED, replacing, save_weights, torch_dist_folder
from slime_core.errors import CheckpointError, ConfigError
from slime_core.modeling import ParallelLayout, spec_of_checkpoint
from slime_core.modeling.spec import MappedWeight
from slime_core.types import JsonValue
from slime_core.weights import HuggingFaceFolder, WeightSpec, WrittenFile, copy_small_files

CASTS = "slime-convert.json"
"""File in a torch_dist folder: dtypes of weights whose Hugging Face file has another dtype than the model."""

WIDER = {"float32": ("bfloat16", "float16")}
"""dtype -> dtypes that convert to it and back without loss."""

Progress = Callable[[int, int], None]
"""Called with the bytes that this process has converted, and its total."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """Options of a conversion.

    Arguments:
        overwrites: True: an existing checkpoint at the target is replaced.
        plugins: plugins to use in addition to the one that builds the architecture.
        trust_remote_code: True: the checkpoint's own Python code may run.
        layout: layout of the model over the processes; None means one pipeline stage per process.
        progress: called on rank 0.
    """

    overwrites: bool = False
    plugins: tuple[str, ...] = ()
    trust_remote_code: bool = False
    layout: ParallelLayout | None = None
    progress: Progress = field(default=lambda done, whole: None)

    @property
    def parallel(self) -> ParallelLayout:
        """The layout over the existing processes."""
        return self.layout or ParallelLayout(pipeline=world_size())


def to_torch_dist(source: Path, target: Path, how: Conversion) -> list[str]:
    """Write the Hugging Face folder ``source`` as the torch_dist folder ``target``. Collective.

    Returns:
        Names of the weights that the model has no place for and that are left out.

    Raises:
        ConfigError: the source is not such a folder, or the target exists.
        CheckpointError: the weights do not match the config, or the target cannot be written.
    """
    _refuse_target(target, source, how)
    config = config_of(source)
    files = HuggingFaceWeights(source)
    spec = spec_of_checkpoint(source, config, plugins=how.plugins, trust_remote_code=how.trust_remote_code)
    with parallel_groups(how.parallel):
        model = ConvertedModel(spec, config, dtype=files.dtype, layout=how.parallel)
        expected = {name: weight for of_rank in gather(model.specs) for name, weight in of_rank.items()}
        stored = {name: weight for name, weight in files.specs.items() if not spec.leaves_out(name)}
        casts = _casts(stored, expected)
        on_first(lambda: _require_fit(source, stored, expected, casts))
        filling = _Filling(model, files, how.progress if dist.get_rank() == 0 else None)
        with _draft(target) as draft:
            save_weights(draft, chunks=model.chunks, fill=filling)
            filling.end()
            on_first(lambda: _carry(source, draft, casts))
        return [name for name in files.specs if name not in stored]


def to_hugging_face(
    source: Path, target: Path, how: Conversion, *, origin: Path | None = None, vocab_size: int | None = None
) -> None:
    """Write the torch_dist checkpoint ``source`` as the Hugging Face folder ``target``. Collective.

    Arguments:
        origin: Hugging Face folder with config and tokenizer; None uses those in the checkpoint.
        vocab_size: rows of the embedding without padding; None means as in ``config.json``.

    Raises:
        ConfigError: the source is not such a checkpoint, or the target exists.
        CheckpointError: it does not match its model, or the target cannot be written.
    """
    _refuse_target(target, source, how)
    with parallel_groups(how.parallel):
        stored, template, changes = _open_torch_dist(source, how, origin=origin, vocab_size=vocab_size)
        total = sum(spec.nbytes for spec in stored.specs.values())
        with _draft(target) as draft:
            written, done = HuggingFaceFolder(draft, rank=dist.get_rank()), 0
            for part in stored.parts():
                written.add(part)
                done += sum(weight.nbytes for weight in part.values())
                if dist.get_rank() == 0:
                    how.progress(done, total)
            parts = [part for of_rank in gather(written.close()) for part in of_rank]
            on_first(lambda: _finish(written, template, parts, draft, changes))


def _finish(
    written: HuggingFaceFolder,
    template: Path,
    parts: Sequence[WrittenFile],
    draft: Path,
    changes: Mapping[str, JsonValue],
) -> None:
    written.finish(template=template, parts=parts)
    if changes:
        content = json.dumps({**config_of(template), **changes}, indent=2) + "\n"
        (draft / "config.json").write_text(content, encoding="utf-8")


def verify(a: Path, b: Path, how: Conversion, *, origin: Path | None = None) -> list[str]:
    """Return the differences between the weights of two checkpoints of any formats, bit for bit; empty: none.

    Raises:
        ConfigError: one is not a checkpoint.
        CheckpointError: one is broken.
    """
    with parallel_groups(ParallelLayout()):
        first, second = (_open(path, how, origin=origin) for path in (a, b))
        mistakes = [
            f"{kind}: {text}"
            for kind, texts in compare(_shapes(second.specs), _shapes(first.specs)).kinds.items()
            for text in texts
        ]
        comparable = {name for name, spec in first.specs.items() if second.specs.get(name) == spec}
        total = sum(first.specs[name].nbytes for name in comparable)
        done = 0
        for part in _parts(first):
            names = [name for name in part if name in comparable]
            others = second.read(names)
            mistakes += [text for name in names if (text := _difference(name, part[name], others[name]))]
            done += sum(part[name].nbytes for name in names)
            how.progress(done, total)
        return mistakes


Weights = HuggingFaceWeights | TorchDistWeights


def _open(path: Path, how: Conversion, *, origin: Path | None) -> Weights:
    if torch_dist_folder(path) is not None:
        return _open_torch_dist(path, how, origin=origin, vocab_size=None)[0]
    return HuggingFaceWeights(path)


def _open_torch_dist(
    path: Path, how: Conversion, *, origin: Path | None, vocab_size: int | None
) -> tuple[TorchDistWeights, Path, dict[str, JsonValue]]:
    """Return the weights, the folder with their config and tokenizer, and changes to the config."""
    folder = torch_dist_folder(path)
    if folder is None:
        raise ConfigError(
            f"{path} is not a torch_dist checkpoint: it holds no .metadata; accepted: a torch_dist folder, one of "
            "Megatron with iter_NNNNNNN or release in it, and a run or a checkpoint of a run"
        )
    template = origin or carried_folder(folder)
    config = config_of(template)
    changes: dict[str, JsonValue] = {}
    if vocab_size not in (None, config.get("vocab_size")):
        changes["vocab_size"] = vocab_size
    spec = spec_of_checkpoint(template, config, plugins=how.plugins, trust_remote_code=how.trust_remote_code)
    return (
        TorchDistWeights(folder, spec, config | changes, layout=how.parallel, casts=_casts_of(folder)),
        template,
        changes,
    )


def _casts_of(folder: Path) -> dict[str, str]:
    """Return the entries of ``CASTS`` in a torch_dist folder; empty if it has no such file."""
    file = folder / CASTS
    if not file.exists():
        return {}
    match read_object(file):
        case {"dtypes": dict() as found} if set(found.values()) <= set(WIDER["float32"]):
            return found
        case _:
            raise CheckpointError(f'{file} does not hold {{"dtypes": {{WEIGHT: DTYPE}}}}; copy the checkpoint again')


def _parts(weights: Weights) -> Iterator[dict[str, torch.Tensor]]:
    if isinstance(weights, TorchDistWeights):
        yield from weights.parts()
    else:
        yield from (weights.read([name]) for name in weights.specs)


def _difference(name: str, a: torch.Tensor, b: torch.Tensor) -> str | None:
    bits = (tensor.contiguous().reshape(-1).view(torch.uint8).view(-1, tensor.itemsize) for tensor in (a, b))
    first, second = bits
    other = int((first != second).any(1).sum())
    if not other:
        return None
    largest = float((a.double() - b.double()).abs().max())
    return f"other values: {name} differs in {other:,} of {a.numel():,} entries, by at most {largest:.3g}"


# --- From Hugging Face ------------------------------------------------------------------------------------------------


class _Filling:
    """Loads each weight of a Hugging Face folder into the model before it is written, and frees it afterwards."""

    def __init__(self, model: ConvertedModel, files: HuggingFaceWeights, progress: Progress | None) -> None:
        self._model = model
        self._files = files
        self._progress = progress
        self._held: MappedWeight | None = None
        self._memory: Any = None
        self._done = 0
        self._total = sum(spec.nbytes for spec in model.specs.values())

    def __call__(self, tensor: torch.Tensor) -> None:
        weight = self._model.weight_of(tensor)
        if weight is self._held:
            return  # an earlier part of the same weight loaded it
        self.end()
        self._memory = self._model.held([weight])
        self._memory.__enter__()
        self._held = weight
        weight.load(self._files.read)
        self._done += weight.tensor.nbytes
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total)

    def end(self) -> None:
        """Free the last weight."""
        if self._memory is not None:
            self._memory.__exit__(None, None, None)
        self._memory = self._held = None


def _casts(stored: Mapping[str, WeightSpec], expected: Mapping[str, WeightSpec]) -> dict[str, str]:
    """Return name -> dtype in the folder, for weights that the model stores in a wider dtype."""
    both = [(stored[name], expected[name]) for name in stored if name in expected]
    return {spec.name: spec.dtype for spec, other in both if spec.dtype in WIDER.get(other.dtype, ())}


def _require_fit(
    source: Path, stored: Mapping[str, WeightSpec], expected: Mapping[str, WeightSpec], casts: Mapping[str, str]
) -> None:
    required = {name: (spec.shape, casts.get(name, spec.dtype)) for name, spec in expected.items()}
    if differences := compare(_shapes(stored), required):
        raise CheckpointError(
            f"{source} does not fit its config.json: {differences}. Download it again, or save it with the config that "
            "belongs to it, all weights in one dtype."
        )


def _shapes(specs: Mapping[str, WeightSpec]) -> Shapes:
    return {name: (spec.shape, spec.dtype) for name, spec in specs.items()}


def _carry(source: Path, draft: Path, casts: Mapping[str, str]) -> None:
    (draft / CARRIED).mkdir()
    copy_small_files(source, draft / CARRIED)
    if casts:
        (draft / CASTS).write_text(json.dumps({"dtypes": casts}, indent=2) + "\n", encoding="utf-8")


# --- Targets ----------------------------------------------------------------------------------------------------------


def _refuse_target(target: Path, source: Path, how: Conversion) -> None:
    if not source.is_dir():
        raise ConfigError(f"{source} is not a folder; accepted: a checkpoint on this machine")
    if source.resolve().is_relative_to(target.resolve()):
        raise ConfigError(f"{target} is or contains the checkpoint to convert; choose another target")
    if not target.exists() or (target.is_dir() and next(target.iterdir(), None) is None):
        return
    if not how.overwrites:
        raise ConfigError(f"{target} exists; choose another target, or replace it with --overwrite")
    if torch_dist_folder(target) is None and not (target / "config.json").is_file():
        raise ConfigError(f"{target} exists and is not a checkpoint; --overwrite replaces checkpoints only")


@contextmanager
def _draft(target: Path) -> Iterator[Path]:
    """Yield a folder that all ranks write to; rank 0 renames it to ``target`` after all ranks have left the block."""
    draft = target.with_name(f".{target.name}.draft")
    next_step = "Free space, or choose another target."
    if dist.get_rank() > 0:
        dist.barrier()
        try:
            yield draft
        except OSError as problem:
            raise CheckpointError(f"checkpoint {target} cannot be written: {problem}. {next_step}") from problem
        dist.barrier()
        dist.barrier()
        return
    with replacing(target, next_step=next_step):
        dist.barrier()
        yield draft
        dist.barrier()
    dist.barrier()
