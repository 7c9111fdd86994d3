"""The device and the layout that a run's settings ask for, and what cannot be on that device."""

from __future__ import annotations

from importlib import metadata

from slime_core.config.schema import RunConfig
from slime_core.config.sglang import speculates
from slime_core.errors import ConfigError
from slime_core.runtime.layout import Device, Layout

__all__ = ["asked_layout", "device_of", "refuse_on_device"]


def device_of(config: RunConfig) -> Device:
    """Where learner and engines compute; ``auto`` is decided by the cluster that this process has joined."""
    asked = config.cluster.device
    return "gpu" if asked == "cuda" or (asked == "auto" and _can_use_gpus()) else "cpu"


def refuse_on_device(config: RunConfig, layout: Layout) -> None:
    """Returns if what is asked for works on the device that ``layout`` names.

    Raises:
        ConfigError: it does not; what the settings alone can tell has been refused before.
    """
    if layout.device == "gpu" and layout.colocated and config.transport == "distributed":
        raise ConfigError(
            "update_weight_transport = distributed with colocate on GPUs: NCCL takes no two processes on one GPU, and "
            "the first learner rank shares its GPU with an engine. Choose tensor, disk or auto."
        )
    groups = (*config.engine_groups, *config.beside_groups)
    split = any(group.worker_type != "regular" for group in groups)
    if layout.device == "cpu" and split:
        raise ConfigError(
            "prefill and decode apart hand the cache from GPU to GPU, and this run has none: device = "
            f"{config.cluster.device} means cpu here. Leave prefill_num_servers and worker_type out, or run on GPUs."
        )
    drafts = any(map(speculates, (config.sglang.given, *(group.overrides for group in groups))))
    if layout.device == "cpu" and groups and drafts:
        raise ConfigError(
            "speculative_algorithm needs compiled kernels that SGLang has for GPUs only, and this run has none: device "
            f"= {config.cluster.device} means cpu here. Leave it out, or run on GPUs."
        )


def _can_use_gpus() -> bool:
    from slime_core.runtime.session import cluster_has_gpus  # brings Ray, which a look at the settings does without

    # The CPU build of torch says so in its version; importing torch to ask would cost the driver seconds.
    return cluster_has_gpus() and not metadata.version("torch").endswith("+cpu")


def asked_layout(config: RunConfig, device: Device, *, learner_ranks: int) -> Layout:
    """Learner, critic, the policy's engines and those beside them.

    Arguments:
        device: what ``config.cluster.device`` was resolved to.
        learner_ranks: processes that train; 0: none do.
    """
    (engines, size), *others = [(group.num_engines, group.size) for group in config.engine_groups] or [(0, 1)]
    return Layout(
        learner_ranks,
        engines,
        size,
        device,
        colocated=config.cluster.colocate and learner_ranks > 0 and engines > 0,
        critic_ranks=config.num_critic_ranks if learner_ranks else 0,
        groups=tuple(others),
        beside=tuple((group.num_engines, group.size) for group in config.beside_groups),
    )
