"""Rows and recomputation that fit the memory of a GPU, where a run does not name them.

The first that fits is taken, in an order that follows from arithmetic and that no GPU has confirmed: shorter rows
before recomputation, because 2,048 tokens are enough for the matrix products of a layer, while computing MLPs or whole
layers again adds up to a third to the work.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from slime_core.cli import gpu_memory
from slime_core.cli.needs import Needs
from slime_core.config.load import DEFAULT, Provenance, Resolved
from slime_core.config.schema import RunConfig
from slime_core.config.settings import as_words
from slime_core.errors import ConfigError, PluginError
from slime_core.modeling.memory import RECOMPUTE
from slime_core.plugins.registry import Registry
from slime_core.plugins.selection import has_critic

ROWS = (8192, 4096, 2048)
FITS = "that fits GPUs of"


def with_memory_defaults(resolved: Resolved, registry: Registry) -> Resolved:
    """``resolved``, of a run on GPUs, with rows and recomputation that fit them.

    What the run gives stays. Nothing changes where the memory of a GPU or the sizes of the model are not known, and
    where nothing fits; the preflight refuses that.
    """
    config, memory = resolved.config, gpu_memory.gpu_memory_gib(resolved.config)
    if memory is None:
        return resolved
    try:
        needs = Needs.of(config, trains=True, critic=has_critic(config, registry))
    except (ConfigError, PluginError):  # the preflight reports it
        return resolved
    size = gpu_memory.model_size(config, needs.sizes)
    if size is None or not needs.ranks:
        return resolved
    fits = (one for one in _choices(resolved) if not gpu_memory.too_large(one, size, needs, memory))
    found = replace(resolved, config=next(fits, config))
    before = {key: value for key, (_, value) in resolved.values().items()}
    changed = [key for key, (_, value) in found.values().items() if before.get(key) != value]
    origin = Provenance("default", f"{FITS} {memory:g} GiB")
    return replace(found, provenance={**resolved.provenance, **dict.fromkeys(changed, origin)})


def _choices(resolved: Resolved) -> Iterator[RunConfig]:
    """The settings with each kind of recomputation and length of rows that the run leaves open, the fastest first."""
    config, given = resolved.config, dict(resolved.config.megatron.given)
    learner = config.learner
    # A budget that no sample may exceed, and rows that are counted in samples, are as the user wants them.
    is_free = not learner.hard_token_budget and learner.micro_batch_size is None
    is_free &= resolved.provenance.get("max_tokens_per_gpu", DEFAULT) == DEFAULT
    rows = ROWS if is_free else (learner.max_tokens_per_gpu,)
    open_kinds = [{}] if any(name.startswith("recompute") for name in given) else RECOMPUTE.values()
    for recompute in open_kinds:
        flags = config.megatron.model_copy(update={"given": tuple(sorted({**given, **recompute}.items()))})
        for tokens in rows:
            row = learner.model_copy(update={"max_tokens_per_gpu": tokens})
            yield config.model_copy(update={"learner": row, "megatron": flags})


def chosen(resolved: Resolved) -> Iterator[str]:
    """A line with what was chosen, as flags; none where nothing was."""
    origins = {key: resolved.provenance.get(key, DEFAULT) for key in resolved.values()}
    found = {key: origin for key, origin in origins.items() if origin.where.startswith(FITS)}
    if found:
        flags = " ".join(
            f"{one.flag} {as_words(value)}" for key, (one, value) in resolved.values().items() if key in found
        )
        yield f"memory: {flags} ({next(iter(found.values()))})"
