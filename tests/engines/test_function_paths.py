"""Functions of slime's users on the training side, in a learner with a real model: what they compute is what trains."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from ray import cloudpickle

from slime_core.config.sampling import RolloutConfig
from slime_core.config.schema import RunConfig
from slime_core.errors import CheckpointError, PluginError
from slime_core.rollout.shards import BatchPlan, make_shards
from slime_core.types import Sample, Status
from tests.engines import test_learner
from tests.engines.test_learner import (
    ADVANTAGES,
    EVERYTHING,
    NEAR,
    TEMPERATURE,
    Children,
    Job,
    Outcome,
    distance,
    random_model,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(test_learner)

CODE = '''
import json
from pathlib import Path

import torch

from slime_compat.loss import get_log_probs_and_entropy


def surrogate(args, batch, logits, sum_of_sample_mean):
    """The clipped surrogate, k3 and the entropy bonus, as slime's users write them."""
    _, found = get_log_probs_and_entropy(
        logits, args=args, unconcat_tokens=batch["unconcat_tokens"], total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"], with_entropy=True,
    )
    now, old = torch.cat(found["log_probs"]), torch.cat(batch["log_probs"])
    advantages, reference = torch.cat(batch["advantages"]), torch.cat(batch["ref_log_probs"])
    ratio = (now - old).exp()
    policy = torch.maximum(-ratio * advantages, -ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip) * advantages)
    pg_loss, entropy = sum_of_sample_mean(policy), sum_of_sample_mean(torch.cat(found["entropy"]))
    kl = sum_of_sample_mean((reference - now).exp() - 1 - (reference - now))
    loss = pg_loss - args.entropy_coef * entropy + args.kl_loss_coef * kl
    return loss, {"pg_loss": pg_loss.detach(), "kl_loss": kl.detach()}


def mean_of_samples(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    def reduce(x):
        parts = zip(x.split(response_lengths), loss_masks)
        divisors = [1 if calculate_per_token_loss else max(mask.sum(), 1) for mask in loss_masks]
        return sum((part * mask).sum() / divisor for (part, mask), divisor in zip(parts, divisors))
    return reduce


def given(args, rollout_data):
    """Every token of a sample gets its reward."""
    rewards = rollout_data["rewards"]
    assert [len(one) for one in rollout_data["tokens"]] == rollout_data["total_lengths"]
    assert [len(one) for one in rollout_data["log_probs"]] == rollout_data["response_lengths"]
    rollout_data["advantages"] = [
        torch.full_like(mask, reward) for mask, reward in zip(rollout_data["loss_masks"], rewards)
    ]
    rollout_data["returns"] = rollout_data["advantages"]


def unchanged(*, pg_loss, loss_masks, **_):
    return pg_loss * 1.0, loss_masks, {}


def reject_everything(*, pg_loss, loss_masks, **_):
    return pg_loss, [mask * 0 for mask in loss_masks], {}


def provider(pre_process, post_process, vp_stage=None, config=None):
    from megatron.core.models.gpt.gpt_model import GPTModel

    from slime_core.modeling.spec import local_layers

    return GPTModel(
        config=config, transformer_layer_spec=local_layers(config, vp_stage=vp_stage), vocab_size=48,
        max_sequence_length=64, pre_process=pre_process, post_process=post_process,
        share_embeddings_and_output_weights=False, position_embedding_type="rope", rotary_base=10000, vp_stage=vp_stage,
    )


def layers(args, config, vp_stage):
    from slime_core.modeling.spec import local_layers

    assert args.hf_checkpoint is None
    return local_layers(config, vp_stage=vp_stage)


def without_mlp(args, config, vp_stage):
    from megatron.core.transformer.identity_op import IdentityOp

    block = layers(args, config, vp_stage)
    for layer in block.layer_specs:
        layer.submodules.mlp = IdentityOp
    return block


def no_spec(args, config, vp_stage):
    return provider


def started(args):
    args.calls = ["start"]


def before_log_probs(args, model, store_prefix):
    args.calls.append([store_prefix, sum(1 for chunk in model for _ in chunk.parameters())])


def before_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    args.calls.append([rollout_id, step_id, optimizer.param_groups[0]["lr"], opt_param_scheduler.max_lr])
    Path(args.hf_checkpoint or "CALLS").write_text(json.dumps(args.calls))
'''


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    found = Children()
    yield found
    found.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("code") / "mine.py"
    path.write_text(CODE.replace('args.hf_checkpoint or "CALLS"', repr(str(path.with_suffix(".json")))))
    return path


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """Twelve samples of different lengths, one with masked tokens, one removed, two of one rollout."""
    random = np.random.default_rng(0)
    lengths = random.integers(1, 9, (12, 2)).tolist()
    found = [
        Sample(
            group_index=index // 4,
            index=index,
            tokens=random.integers(0, 48, prompt + response).tolist(),
            response_length=response,
            rollout_log_probs=[-3.0] * response,
            status=Status.COMPLETED,
        )
        for index, (prompt, response) in enumerate(lengths)
    ]
    found[2].loss_mask = [0] + [1] * (found[2].response_length - 1)
    found[7].remove_sample = True
    return found


class Named(NamedTuple):
    """Settings of a run, and the functions that it names by path."""

    config: RunConfig
    functions: dict[str, str]


def with_paths(code: Path, *, algorithm: dict[str, Any] = EVERYTHING, **functions: str) -> Named:
    base = test_learner.settings(algorithm=algorithm)
    rollout = RolloutConfig(rollout_temperature=TEMPERATURE)
    paths = {name: f"{code}:{function}" for name, function in functions.items()}
    return Named(base.model_copy(update={"rollout": rollout}), paths)


def train(children: Children, named: Named, folder: Path, samples: list[Sample], **how: Any) -> Outcome:
    """One rollout of two steps."""
    ranks, tensor, per_token = how.pop("ranks", 1), how.pop("tensor", 1), how.pop("per_token", False)
    estimated = named.config.algorithm.advantage_estimator is not None
    shards = make_shards(
        samples,
        None if estimated else ADVANTAGES,
        BatchPlan(num_ranks=ranks // tensor, num_steps=2, max_tokens=how.pop("max_tokens", 40), per_token=per_token),
        rewards_B=ADVANTAGES if estimated else None,
        rollout=0,
        temperature=TEMPERATURE,
    )
    by_rank = [shards[rank // tensor] for rank in range(ranks)]
    job = Job(named.config, folder, [by_rank], tensor=tensor, functions=named.functions)
    return children.run(job, world_size=ranks)[0]


@pytest.fixture(scope="module")
def siblings(samples: list[Sample]) -> list[Sample]:
    return [replace(sample, rollout_id=40) if sample.index in (0, 1) else sample for sample in samples]


@pytest.fixture(scope="module")
def alone(children, folder, code, siblings) -> Outcome:
    """What the core trains: clipped surrogate, k3 and entropy bonus."""
    return train(children, with_paths(code), folder, siblings)


@pytest.mark.parametrize("how", [{}, {"max_tokens": 1000}, {"ranks": 2}, {"ranks": 2, "tensor": 2}], ids=str)
def test_a_loss_that_computes_what_the_core_computes_trains_the_same(children, folder, code, siblings, alone, how):
    config = with_paths(code, custom_loss_function_path="surrogate")
    found = train(children, config, folder, siblings, **how)
    assert distance(found.weights, alone.weights) < NEAR
    for name in ("train/loss", "train/pg_loss", "train/kl_loss", "train/grad_norm", "train/entropy_loss"):
        assert found.metrics[0][name] == pytest.approx(alone.metrics[0][name], rel=1e-5), name


def test_such_a_loss_averages_over_tokens_where_the_run_does(children, folder, code, samples):
    algorithm = {**EVERYTHING, "calculate_per_token_loss": True}
    expected = train(children, with_paths(code, algorithm=algorithm), folder, samples, per_token=True)
    config = with_paths(code, algorithm=algorithm, custom_loss_function_path="surrogate")
    found = train(children, config, folder, samples, per_token=True, ranks=2)
    assert distance(found.weights, expected.weights) < NEAR


@pytest.mark.parametrize("per_token", [False, True])
def test_the_standard_reducer_trains_what_the_core_trains(children, folder, code, samples, per_token):
    algorithm = {**EVERYTHING, "calculate_per_token_loss": per_token}
    expected = train(children, with_paths(code, algorithm=algorithm), folder, samples, per_token=per_token)
    config = with_paths(code, algorithm=algorithm, custom_pg_loss_reducer_function_path="mean_of_samples")
    found = train(children, config, folder, samples, per_token=per_token, ranks=2)
    assert distance(found.weights, expected.weights) < NEAR
    assert found.metrics[0]["train/pg_loss"] == pytest.approx(expected.metrics[0]["train/pg_loss"], rel=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_advantages_that_a_function_sets_are_trained(children, folder, code, siblings, alone, ranks):
    algorithm = {**EVERYTHING, "advantage_estimator": "custom_advantage_function_path"}
    config = with_paths(code, algorithm=algorithm, custom_advantage_function_path="given")
    found = train(children, config, folder, siblings, ranks=ranks)
    assert distance(found.weights, alone.weights) < NEAR
    assert found.metrics[0]["train/pg_loss"] == pytest.approx(alone.metrics[0]["train/pg_loss"], rel=1e-5)


def test_a_correction_that_changes_nothing_trains_the_same(children, folder, code, siblings, alone):
    found = train(children, with_paths(code, custom_tis_function_path="unchanged"), folder, siblings)
    assert found.metrics == alone.metrics
    assert distance(found.weights, alone.weights) == 0.0


def test_a_correction_that_rejects_everything_leaves_no_gradient(children, folder, code, siblings):
    found = train(children, with_paths(code, custom_tis_function_path="reject_everything"), folder, siblings)
    assert found.metrics[0]["train/grad_norm"] == 0.0


@pytest.mark.parametrize("functions", [{"custom_model_provider_path": "provider"}, {"spec": "layers"}], ids=str)
def test_a_model_that_a_function_builds_gets_the_weights_of_its_family(
    children, folder, code, siblings, alone, functions
):
    found = train(children, with_paths(code, **functions), folder, siblings)
    assert found.metrics == alone.metrics
    assert distance(found.weights, alone.weights) == 0.0


def test_a_model_without_a_place_for_a_weight_is_refused(children, folder, code, siblings):
    with pytest.raises(CheckpointError, match=r"pre_mlp_layernorm\.weight.* qwen3 "):
        train(children, with_paths(code, spec="without_mlp"), folder, siblings)


def test_a_spec_that_returns_a_function_is_refused(children, folder, code, siblings):
    message = "it returned a function; accepted: a layer spec of Megatron. .* named with --custom-model-provider-path"
    with pytest.raises(PluginError, match=message):
        train(children, with_paths(code, spec="no_spec"), folder, siblings)


def test_megatron_hooks_are_called_in_order_with_what_slime_hands_over(children, folder, code, siblings, alone):
    import json

    functions = {
        "custom_megatron_init_path": "started",
        "custom_megatron_before_log_prob_hook_path": "before_log_probs",
        "custom_megatron_before_train_step_hook_path": "before_step",
    }
    found = train(children, with_paths(code, **functions), folder, siblings)
    assert found.metrics == alone.metrics
    calls = json.loads(code.with_suffix(".json").read_text())
    (parameters,) = {call[1] for call in calls[1:3]}
    assert parameters > 10
    assert calls == ["start", ["ref_", parameters], ["", parameters], [0, 0, 3e-3, 3e-3], [0, 1, 3e-3, 3e-3]]
