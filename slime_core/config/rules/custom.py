"""Rules between functions that are named by path and the other settings."""

from __future__ import annotations

from collections.abc import Iterator

from slime_core.config.rules.layout import Rule
from slime_core.config.schema import RunConfig

__all__ = ["CUSTOM"]

OF_WHOLE_RESPONSES = (
    "custom_loss_function_path",
    "custom_tis_function_path",
    "custom_pg_loss_reducer_function_path",
    "rollout_data_postprocess_path",
)
"""Their functions index tokens by response; a context-parallel rank holds parts of responses."""


def _responses_are_whole(config: RunConfig) -> Iterator[str]:
    size, paths = config.parallel.context_parallel_size, dict(config.custom)
    for name in OF_WHOLE_RESPONSES:
        path = paths[name]
        if path is not None and size > 1:
            yield (
                f"{name} = {path} works on whole responses, and context_parallel_size = {size} splits them over ranks; "
                "leave one of the two out"
            )


def _columns_reach_the_critic(config: RunConfig) -> Iterator[str]:
    path, ranks = config.custom.rollout_data_postprocess_path, config.num_critic_ranks
    if path is not None and ranks:
        yield (
            f"rollout_data_postprocess_path = {path} changes what the actor's ranks train on, and critic_num_gpus = "
            f"{ranks} has a critic on ranks of its own, which would not see the change; leave one of the two out"
        )


def _weights_are_files(config: RunConfig) -> Iterator[str]:
    path, transport = config.custom.custom_update_weight_post_write_path, config.transport
    if path is not None and transport != "disk":
        yield (
            f"custom_update_weight_post_write_path = {path} has no effect where weights travel by {transport}, because "
            "no file is written; add --update-weight-transport disk, or leave it out"
        )


def _one_loss(config: RunConfig) -> Iterator[str]:
    loss, paths = config.custom.custom_loss_function_path, dict(config.custom)
    for name in ("custom_tis_function_path", "custom_pg_loss_reducer_function_path"):
        path = paths[name]
        if path is not None and loss is not None:
            yield (
                f"{name} = {path} changes the policy loss, which custom_loss_function_path = {loss} replaces; leave "
                "one of the two out"
            )
    if config.algorithm.corrections and loss is not None:
        names = " ".join(config.algorithm.corrections)
        yield (
            f"corrections = {names} weigh the policy loss, which custom_loss_function_path = {loss} replaces; leave "
            "one of the two out"
        )
    if config.algorithm.policy_loss is not None and loss is not None:
        yield (
            f"policy_loss = {config.algorithm.policy_loss}, which custom_loss_function_path = {loss} replaces; leave "
            "one of the two out"
        )


def _one_model(config: RunConfig) -> Iterator[str]:
    spec, provider = config.custom.spec, config.custom.custom_model_provider_path
    if spec and provider is not None:
        yield (
            f"spec = {' '.join(spec)} gives the layers of the model that custom_model_provider_path = {provider} "
            "builds by itself; leave one of the two out"
        )
    if len(spec) not in (0, 2):
        yield f"spec = {' '.join(spec)}: accepted are a module and a function, --spec MODULE FUNCTION"


CUSTOM: dict[Rule, str] = {
    _responses_are_whole: f"context_parallel_size {' '.join(OF_WHOLE_RESPONSES)}",
    _columns_reach_the_critic: "rollout_data_postprocess_path critic_num_gpus",
    _weights_are_files: "custom_update_weight_post_write_path update_weight_transport colocate",
    _one_loss: (
        "custom_loss_function_path custom_tis_function_path custom_pg_loss_reducer_function_path corrections "
        "policy_loss"
    ),
    _one_model: "spec custom_model_provider_path",
}
"""Rules of a run -> the settings that each reads."""
