"""Rules of models: they divide over ranks and devices, and those in addition to the actor fit it.

What divides what is Megatron-core 0.16's (``TransformerConfig.__post_init__``, ``initialize_model_parallel``) and, for
an engine, SGLang 0.5's; both would say so only after they have started. Critic, reference, teacher and routing replay
are compared by ``config.json``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from slime_core.config.model_config import (
    EXPERTS,
    config_folder,
    described,
    differences,
    forward_flops,
    routes_shape,
    start_weights,
    torch_dist_folder,
    whole_number,
)
from slime_core.config.rules import Rule
from slime_core.config.schema import RunConfig

KEY_VALUE_HEADS = "num_key_value_heads"

MOST_PROCESSES = 65_536
"""Most processes of a run; no cluster has as many."""

SOME_ARE_DENSE = ("mlp_only_layers", "first_k_dense_replace")
"""With these, layers of a mixture have no experts; so they have with a ``decoder_sparse_step`` above 1."""


def _copies_fill_the_ranks(config: RunConfig) -> Iterator[str]:
    sizes, ranks = config.parallel, config.num_learner_ranks
    if ranks % sizes.model_size:
        nodes, each = config.cluster.actor_num_nodes, config.cluster.actor_num_gpus_per_node
        yield (
            "tensor_model_parallel_size x pipeline_model_parallel_size x context_parallel_size = "
            f"{sizes.tensor_model_parallel_size} x {sizes.pipeline_model_parallel_size} x "
            f"{sizes.context_parallel_size} = {sizes.model_size} ranks hold one copy of the model, but "
            f"actor_num_nodes x actor_num_gpus_per_node = {nodes} x {each} = {ranks} is no multiple of "
            f"{sizes.model_size}; give {sizes.model_size} ranks or a multiple, or lower a parallel size"
        )


def _heads_and_vocabulary_divide(config: RunConfig) -> Iterator[str]:
    size = config.parallel.tensor_model_parallel_size
    yield from _uneven(config, "tensor_model_parallel_size", size, "num_attention_heads", "vocab_size")


def _processes_can_be_counted(config: RunConfig) -> Iterator[str]:
    """Checked first, because later rules make lists with an entry for each process."""
    groups = (*config.engine_groups, *config.auxiliary_groups)
    total = config.num_started_ranks + config.num_critic_ranks + sum(group.num_gpus for group in groups)
    if total > MOST_PROCESSES:
        yield (
            f"{total:,} processes or devices, of learner, critic and engines together; accepted: at most "
            f"{MOST_PROCESSES:,}. Lower actor_num_nodes, actor_num_gpus_per_node, critic_num_gpus, rollout_num_gpus, "
            "eval_num_gpus or num_gpus of an engine group or model"
        )


def _engine_heads_divide(config: RunConfig) -> Iterator[str]:
    size_of_engines = config.cluster.rollout_num_gpus_per_engine
    if config.engine.engine_groups:
        size_of_engines = 1  # each group has its own
    yield from _uneven(config, "rollout_num_gpus_per_engine", size_of_engines, "num_attention_heads")
    for size in sorted({group.num_gpus_per_engine or size_of_engines for group in config.engine.engine_groups}):
        yield from _uneven(config, "engine_groups: num_gpus_per_engine", size, "num_attention_heads")
    if (size_of_own := config.eval.eval_num_gpus_per_engine) is not None:
        yield from _uneven(config, "eval_num_gpus_per_engine", size_of_own, "num_attention_heads")


def _every_chunk_has_a_layer(config: RunConfig) -> Iterator[str]:
    stages, chunks = config.parallel.pipeline_model_parallel_size, config.parallel.num_virtual_stages_per_pipeline_rank
    folder = start_weights(config)
    layers = whole_number(folder, "num_hidden_layers")
    # The last chunk needs no layer, because it computes the logits.
    if layers is None or stages * chunks <= layers + 1:
        return
    product = "pipeline_model_parallel_size"
    numbers = f"{stages}"
    if chunks > 1:
        product += " x num_virtual_stages_per_pipeline_rank"
        numbers += f" x {chunks} = {stages * chunks}"
    yield (
        f"{product} = {numbers} divides the num_hidden_layers = {layers} of {folder / 'config.json'} into too many "
        f"chunks; accepted: at most {layers + 1}, so that every chunk but the last has a layer"
    )


def _experts_divide(config: RunConfig) -> Iterator[str]:
    size, folder = config.parallel.expert_model_parallel_size, start_weights(config)
    if size == 1 or described(folder) is None:
        return
    experts = whole_number(folder, *EXPERTS)
    name = f"expert_model_parallel_size = {size}"
    if experts is None:
        yield f"{name}, but {folder / 'config.json'} describes a model without experts; leave it out"
    elif experts % size:
        yield f"{name} does not divide its {experts} experts; accepted: {_listed(_divisors(experts))}"


def _experts_have_whole_sequences(config: RunConfig) -> Iterator[str]:
    sizes, folder = config.parallel, start_weights(config)
    experts = whole_number(folder, *EXPERTS)
    if experts is not None and sizes.tensor_model_parallel_size > 1 and not sizes.sequence_parallel:
        yield (
            f"tensor_model_parallel_size = {sizes.tensor_model_parallel_size} with sequence_parallel = false: "
            f"{folder / 'config.json'} describes a mixture of {experts} experts, and Megatron trains one over "
            "tensor-parallel ranks only where they share sequences too; give sequence_parallel = true, or "
            "tensor_model_parallel_size = 1"
        )


def _experts_lie_in_a_stage(config: RunConfig) -> Iterator[str]:
    sizes = config.parallel
    size, each = sizes.expert_model_parallel_size, sizes.expert_tensor_parallel_size or sizes.tensor_model_parallel_size
    whole = config.num_learner_ranks % sizes.model_size == 0
    ranks = config.num_learner_ranks // sizes.pipeline_model_parallel_size
    if not whole or ranks % (size * each) == 0:
        return
    if ranks % each:
        yield (
            f"expert_tensor_parallel_size = {each} does not divide the {ranks} learner ranks of a pipeline stage; "
            f"accepted: {_listed(_divisors(ranks))}"
        )
        return
    shares = f" of {each} that share an expert (expert_tensor_parallel_size)" if each > 1 else ""
    yield (
        f"expert_model_parallel_size = {size} does not divide the {ranks // each} groups{shares} in the {ranks} "
        f"learner ranks of a pipeline stage; accepted: {_listed(_divisors(ranks // each))}, or more learner ranks"
    )


def _every_copy_has_samples(config: RunConfig) -> Iterator[str]:
    copies = config.num_data_ranks
    if config.samples_per_step < copies:
        ranks, size = config.num_learner_ranks, config.parallel.model_size
        yield (
            f"an optimizer step has global_batch_size = {config.samples_per_step} sample(s), but the {ranks} learner "
            f"ranks / {size} per copy of the model = {copies} data-parallel ranks need at least one each. Raise "
            f"--global-batch-size to at least {copies}, or use fewer ranks"
        )


def _colocated_engines_have_devices(config: RunConfig) -> Iterator[str]:
    engines, ranks = config.cluster.rollout_num_gpus, config.num_learner_ranks
    if config.cluster.colocate and engines > ranks:
        nodes, each = config.cluster.actor_num_nodes, config.cluster.actor_num_gpus_per_node
        yield (
            f"colocate: rollout_num_gpus = {engines} is more than the learner's devices, actor_num_nodes x "
            f"actor_num_gpus_per_node = {nodes} x {each} = {ranks}, which engines share; give at most {ranks}"
        )


def _uneven(config: RunConfig, setting: str, size: int, *even: str) -> Iterator[str]:
    """A message if ``size`` tensor-parallel processes cannot share heads, vocabulary or widths of the model evenly."""
    folder = start_weights(config)
    counts = {name: whole_number(folder, name) for name in (*even, KEY_VALUE_HEADS, *_widths(folder))}
    known = {name: count for name, count in counts.items() if count is not None}
    bad = [f"{name} = {count}" for name, count in known.items() if not _fits(size, name, count)]
    if bad:
        largest = min((count for name, count in known.items() if name != KEY_VALUE_HEADS), default=size)
        good = [one for one in range(1, largest + 1) if all(_fits(one, *pair) for pair in known.items())]
        yield (
            f"{setting} = {size} does not divide {', '.join(bad)} of {folder / 'config.json'}; "
            f"accepted: {_listed(good)}"
        )


def _widths(folder: Path) -> Iterator[str]:
    """The inner widths of feed-forward layers in ``config.json``: of experts, and of dense layers."""
    found = described(folder) or {}
    mixture = whole_number(folder, *EXPERTS) is not None and "moe_intermediate_size" in found
    if mixture:
        yield "moe_intermediate_size"
    if not mixture or any(found.get(name) for name in SOME_ARE_DENSE) or found.get("decoder_sparse_step", 1) != 1:
        yield "intermediate_size"


def _fits(size: int, name: str, count: int) -> bool:
    # Fewer key-value heads than ranks are repeated, as long as every rank gets one.
    return count % size == 0 or (name == KEY_VALUE_HEADS and size % count == 0)


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


LEARNER_LAYOUT: tuple[Rule, ...] = (
    _copies_fill_the_ranks,
    _every_copy_has_samples,
    _heads_and_vocabulary_divide,
    _every_chunk_has_a_layer,
    _experts_divide,
    _experts_have_whole_sequences,
    _experts_lie_in_a_stage,
)

ENGINE_LAYOUT: tuple[Rule, ...] = (_processes_can_be_counted, _engine_heads_divide)

RUN_LAYOUT: tuple[Rule, ...] = (*LEARNER_LAYOUT, _colocated_engines_have_devices)


def _further_models_are_the_same_model(config: RunConfig) -> Iterator[str]:
    """Compare what further models are loaded from with the actor, as far as config.json shows."""
    algorithm, folders = config.algorithm, {"critic_load": config.critic.critic_load}
    if algorithm.use_kl_loss or algorithm.kl_coef > 0:
        folders["ref_load"] = config.model.ref_load
    if algorithm.use_opd:
        folders["opd_teacher_load"] = algorithm.opd_teacher_load
    ours = described(start_weights(config))
    for setting, folder in folders.items():
        stored = torch_dist_folder(folder) if folder is not None else None
        source = (config_folder(stored) if stored is not None else None) or folder
        theirs = described(source) if source is not None else None
        found = differences(theirs, ours) if theirs is not None and ours is not None else []
        if found:  # another rule reports a folder without config.json
            yield (
                f"{setting} = {folder}: {_SAME_MODEL[setting]}, but its config.json differs from that of "
                f"{start_weights(config)}: {'; '.join(found)}; give a model of the same architecture, sizes and "
                "vocabulary"
            )


_SAME_MODEL = {
    "critic_load": "the critic has the architecture of the actor, except for its head",
    "ref_load": "the reference and the actor are computed with the same model object",
    "opd_teacher_load": "the teacher and the actor are computed with the same model object",
}
"""Setting -> why its model has to be the actor's."""


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


def _work_can_be_counted(config: RunConfig) -> Iterator[str]:
    folder = start_weights(config)
    content = described(folder)
    if not config.learner.balance_by_flops or content is None:
        return
    try:
        forward_flops(content)
    except ValueError as error:
        yield f"balance_by_flops: {folder / 'config.json'} {error}; leave it out, and ranks are balanced by tokens"


MODELS: tuple[Rule, ...] = (
    _further_models_are_the_same_model,
    _separate_critic_fits_its_devices,
    _a_mixture_is_there,
    _routes_come_from_whole_engines,
    _work_can_be_counted,
)
