"""The rules of models in addition to the actor, and of routing replay: critic, reference, teacher."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from slime_core.config.model_config import described, differences, forward_flops, routes_shape, start_weights
from slime_core.config.rules import Rule
from slime_core.config.rules.layout import LEARNER_LAYOUT
from slime_core.config.schema import RunConfig

__all__ = ["MODELS", "other_model", "recomputes"]


def _reference_is_the_same_model(config: RunConfig) -> Iterator[str]:
    if _has_reference(config) and config.model.ref_load is not None:
        yield from _other_model(config, "ref_load", "reference")


def _teacher_is_the_same_model(config: RunConfig) -> Iterator[str]:
    if config.algorithm.use_opd and config.algorithm.opd_teacher_load is not None:
        yield from _other_model(config, "opd_teacher_load", "teacher")


def _has_reference(config: RunConfig) -> bool:
    return config.algorithm.use_kl_loss or config.algorithm.kl_coef > 0


def _other_model(config: RunConfig, setting: str, role: str) -> Iterator[str]:
    """Why the weights of ``setting`` cannot be loaded into the actor's model, as far as config.json shows."""
    folder = config.model.ref_load if setting == "ref_load" else config.algorithm.opd_teacher_load
    yield from other_model(
        config, setting, folder, why=f"the {role} and the actor are computed with the same model object"
    )


def other_model(config: RunConfig, setting: str, folder: Path | None, *, why: str) -> Iterator[str]:
    """A message if ``folder`` of ``setting`` has another model than the actor's, as far as config.json shows.

    Arguments:
        why: they have to be the same, in words.
    """
    theirs, ours = described(folder) if folder is not None else None, described(start_weights(config))
    if theirs is None or ours is None:
        return  # another rule says so
    found = differences(theirs, ours)
    if found:
        yield (
            f"{setting} = {folder}: {why}, but its config.json differs from that of "
            f"{start_weights(config)}: {'; '.join(found)}; give a model of the same architecture, sizes and vocabulary"
        )


_ROLES: tuple[Rule, ...] = (
    _reference_is_the_same_model,
    _teacher_is_the_same_model,
)


def _separate_critic_fits_its_devices(config: RunConfig) -> Iterator[str]:
    """Apply the rules of the learner's layout to the critic's, with its names in the messages."""
    ranks = config.num_critic_ranks
    if not ranks:
        return
    alone = config.model_copy(
        update={
            "parallel": config.critic_parallel,
            "cluster": config.cluster.model_copy(update={"actor_num_nodes": 1, "actor_num_gpus_per_node": ranks}),
        }
    )
    for message in (message for rule in LEARNER_LAYOUT for message in rule(alone)):
        yield "critic: " + _in_words_of_the_critic(message, ranks)


def _critic_is_the_same_model(config: RunConfig) -> Iterator[str]:
    why = "the critic has the architecture of the actor, except for its head"
    yield from other_model(config, "critic_load", config.critic.critic_load, why=why)


def _in_words_of_the_critic(message: str, ranks: int) -> str:
    message = message.replace(
        f"actor_num_nodes x actor_num_gpus_per_node = 1 x {ranks} = {ranks}", f"critic_num_gpus = {ranks}"
    )
    own = "|".join(name.removeprefix("critic_") for name in _OWN_LAYOUT)
    return re.sub(rf"\b({own})\b", r"critic_\1", message).replace("learner ranks", "critic ranks")


_OWN_LAYOUT = (
    "critic_tensor_model_parallel_size",
    "critic_sequence_parallel",
    "critic_pipeline_model_parallel_size",
    "critic_context_parallel_size",
)

_CRITIC: tuple[Rule, ...] = (
    _separate_critic_fits_its_devices,
    _critic_is_the_same_model,
)


def _a_mixture_is_there(config: RunConfig) -> Iterator[str]:
    folder, learner = start_weights(config), config.learner
    requested = {
        "use_routing_replay": learner.use_routing_replay,
        "use_rollout_routing_replay": learner.use_rollout_routing_replay,
    }
    if described(folder) is not None and routes_shape(folder) is None:
        for name in (name for name, is_requested in requested.items() if is_requested):
            yield (
                f"{name} replays the experts that each token takes, but {folder / 'config.json'} (hf_checkpoint) "
                "describes a model without experts; leave it out"
            )


def _routes_come_from_whole_engines(config: RunConfig) -> Iterator[str]:
    if config.learner.use_rollout_routing_replay and config.splits_prefill:
        yield (
            "use_rollout_routing_replay sends requests to engines directly, because sglang-router does not pass on "
            "return_routed_experts, but separate prefill and decode engines answer through the router only; leave "
            "one of the two out"
        )


def recomputes(config: RunConfig) -> bool:
    """Whether the backward pass runs parts of the forward pass again, routers perhaps among them."""
    return bool(config.megatron.transformer.get("recompute_granularity"))


_ROUTING: tuple[Rule, ...] = (
    _a_mixture_is_there,
    _routes_come_from_whole_engines,
)


def _work_can_be_counted(config: RunConfig) -> Iterator[str]:
    folder = start_weights(config)
    content = described(folder)
    if not config.learner.balance_by_flops or content is None:
        return
    try:
        forward_flops(content)
    except ValueError as error:
        yield f"balance_by_flops: {folder / 'config.json'} {error}; leave it out, and ranks are balanced by tokens"


MODELS: tuple[Rule, ...] = (*_ROLES, *_CRITIC, *_ROUTING, _work_can_be_counted)
