"""The rules of routing replay, which only a mixture of experts has."""

from __future__ import annotations

from collections.abc import Iterator

from slime_core.config.described import described, routes_shape, start_weights
from slime_core.config.rules.layout import Rule
from slime_core.config.schema import RunConfig

__all__ = ["ROUTING", "recomputes"]


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


ROUTING: dict[Rule, str] = {
    _a_mixture_is_there: "use_routing_replay use_rollout_routing_replay hf_checkpoint",
    _routes_come_from_whole_engines: (
        "use_rollout_routing_replay prefill_num_servers engine_groups rollout_num_gpus rollout_num_gpus_per_engine "
        "rollout_external_engine_addrs debug_train_only load_debug_rollout_data"
    ),
    _a_pass_before_training_records: "use_routing_replay use_rollout_logprobs",
}
"""Rule -> the settings it reads."""
