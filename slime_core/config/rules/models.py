"""The rules of models besides the actor, and of routing replay: critic, reference, teacher."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from slime_core.config.described import described, differences, routes_shape, start_weights
from slime_core.config.rules.layout import LEARNER_LAYOUT, Rule
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
    """What keeps the weights of ``setting`` from playing in the actor's model, as far as config.json says."""
    folder = config.model.ref_load if setting == "ref_load" else config.algorithm.opd_teacher_load
    yield from other_model(config, setting, folder, why=f"the {role} takes turns with the actor in one model")


def other_model(config: RunConfig, setting: str, folder: Path | None, *, why: str) -> Iterator[str]:
    """That ``folder`` of ``setting`` describes another model than the actor's, as far as both config.json say.

    Arguments:
        why: they have to be the same, in words.
    """
    theirs, ours = described(folder) if folder is not None else None, described(start_weights(config))
    if theirs is None or ours is None:
        return  # another rule says so
    found = differences(theirs, ours)
    if found:
        yield (
            f"{setting} = {folder}: {why}, and its config.json describes another one than that of "
            f"{start_weights(config)}: {'; '.join(found)}; give a model of the same architecture, sizes and vocabulary"
        )


_ROLES: tuple[Rule, ...] = (
    _reference_is_the_same_model,
    _teacher_is_the_same_model,
)


def _actor_has_rollouts_left(config: RunConfig) -> Iterator[str]:
    alone, total = config.critic.num_critic_only_steps, config.rollout.num_rollout
    if alone >= total > 0:
        yield (
            f"num_critic_only_steps = {alone} leaves the actor no rollout: num_rollout = {total}; give at most "
            f"{total - 1}, or more rollouts"
        )


def _critic_rate_is_in_bounds(config: RunConfig) -> Iterator[str]:
    rate, optimizer = config.critic.critic_lr, config.optimizer
    for name, bound in {"min_lr": optimizer.min_lr, "lr_warmup_init": optimizer.lr_warmup_init}.items():
        if rate is not None and rate < bound:
            yield (
                f"critic_lr = {rate:g} is below {name} = {bound:g}, which the critic's schedule shares with the "
                f"actor's; raise critic_lr, or lower {name}"
            )


def _critic_warm_up_ends(config: RunConfig) -> Iterator[str]:
    """The rules of the actor's schedule, for the warm-up that the critic has of its own."""
    settings, warmup = config.optimizer, config.critic.critic_lr_warmup_iters
    if warmup is None:
        return
    if settings.lr_decay_iters is not None and settings.lr_decay_iters <= warmup:
        yield (
            f"critic_lr_warmup_iters = {warmup} is not below lr_decay_iters = {settings.lr_decay_iters}, which the "
            f"critic's schedule shares with the actor's; give at most {settings.lr_decay_iters - 1}, or raise "
            "lr_decay_iters"
        )
        return
    end = settings.lr_decay_iters or config.rollout.num_rollout * config.steps_per_rollout
    last = settings.lr_wsd_decay_iters if settings.lr_decay_style == "WSD" else None
    if last is not None and last > end - warmup:
        name = "lr_decay_iters" if settings.lr_decay_iters else "num_rollout x steps a rollout"
        yield (
            f"lr_wsd_decay_iters = {last} is more than the critic's steps after warm-up: {name} - "
            f"critic_lr_warmup_iters = {end} - {warmup} = {end - warmup}; give at most that, or lower "
            "critic_lr_warmup_iters"
        )


def _critic_apart_fits_its_devices(config: RunConfig) -> Iterator[str]:
    """The rules of the learner's layout, for the critic's and in its words."""
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
    why = "the critic is built as the actor is, its head aside"
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
    _actor_has_rollouts_left,
    _critic_rate_is_in_bounds,
    _critic_warm_up_ends,
    _critic_apart_fits_its_devices,
    _critic_is_the_same_model,
)


def _a_mixture_is_there(config: RunConfig) -> Iterator[str]:
    folder, learner = start_weights(config), config.learner
    asked = {
        "use_routing_replay": learner.use_routing_replay,
        "use_rollout_routing_replay": learner.use_rollout_routing_replay,
    }
    if described(folder) is not None and routes_shape(folder) is None:
        for name in (name for name, is_asked in asked.items() if is_asked):
            yield (
                f"{name} replays the experts that each token takes, but {folder / 'config.json'} (hf_checkpoint) "
                "describes a model without experts; leave it out"
            )


def _routes_come_from_whole_engines(config: RunConfig) -> Iterator[str]:
    if config.learner.use_rollout_routing_replay and config.splits_prefill:
        yield (
            "use_rollout_routing_replay asks engines directly, because sglang-router does not pass on "
            "return_routed_experts, and prefill and decode apart can be asked through the router only; leave one of "
            "the two out"
        )


def _a_pass_before_training_records(config: RunConfig) -> Iterator[str]:
    if config.learner.use_routing_replay and config.algorithm.use_rollout_logprobs and not recomputes(config):
        yield (
            "use_routing_replay takes the routes of the learner's pass before training, and use_rollout_logprobs has "
            "the engine's log-probs in place of that pass, so there would be nothing to replay; leave one of the two "
            "out"
        )


def recomputes(config: RunConfig) -> bool:
    """Whether the backward pass runs parts of the forward pass again, routers perhaps among them."""
    return bool(config.megatron.transformer.get("recompute_granularity"))


_ROUTING: tuple[Rule, ...] = (
    _a_mixture_is_there,
    _routes_come_from_whole_engines,
    _a_pass_before_training_records,
)

MODELS: tuple[Rule, ...] = (*_ROLES, *_CRITIC, *_ROUTING)
