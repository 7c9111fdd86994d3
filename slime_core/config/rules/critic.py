"""The rules of the critic. Whether there is one is for the advantage estimator to say, see ``plugins/selection.py``."""

from __future__ import annotations

import re
from collections.abc import Iterator

from slime_core.config.rules.layout import LEARNER_LAYOUT, Rule
from slime_core.config.rules.roles import other_model
from slime_core.config.schema import RunConfig

__all__ = ["CRITIC"]


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

CRITIC: dict[Rule, str] = {
    _actor_has_rollouts_left: "num_critic_only_steps num_rollout",
    _critic_rate_is_in_bounds: "critic_lr min_lr lr_warmup_init",
    _critic_warm_up_ends: (
        "critic_lr_warmup_iters lr_decay_iters lr_decay_style lr_wsd_decay_iters num_rollout rollout_batch_size "
        "n_samples_per_prompt global_batch_size num_steps_per_rollout"
    ),
    _critic_apart_fits_its_devices: " ".join(("critic_num_gpus", *_OWN_LAYOUT, *LEARNER_LAYOUT.values())),
    _critic_is_the_same_model: "hf_checkpoint critic_load",
}
"""Rule -> the settings it reads."""
