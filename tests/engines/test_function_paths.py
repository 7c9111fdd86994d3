"""Functions of slime's users on the training side, in a learner with a real model: what they compute is what trains."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from slime_core.config.sampling import RolloutConfig
from slime_core.errors import CheckpointError, PluginError
from slime_core.rollout.shards import BatchPlan, make_shards
from slime_core.types import Sample
from tests.engines.learners import ADVANTAGES, EVERYTHING, NEAR, TEMPERATURE, Learners, Outcome, distance, settings

FUNCTIONS = (
    *("custom_loss_function_path", "custom_pg_loss_reducer_function_path", "custom_advantage_function_path"),
    *("custom_tis_function_path", "custom_model_provider_path", "spec", "custom_megatron_init_path"),
    *("custom_megatron_before_log_prob_hook_path", "custom_megatron_before_train_step_hook_path"),
)
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
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("code") / "mine.py"
    path.write_text(CODE.replace('args.hf_checkpoint or "CALLS"', repr(str(path.with_suffix(".json")))))
    return path


@pytest.fixture(scope="module")
def siblings(samples: list[Sample]) -> list[Sample]:
    """Two are of one rollout."""
    return [replace(sample, rollout_id=40) if sample.index in (0, 1) else sample for sample in samples]


@dataclass(frozen=True)
class Trains:
    """Trains one rollout of two steps with functions of ``code``, named by option."""

    learners: Learners
    folder: Path
    code: Path

    def __call__(self, samples: list[Sample], *, algorithm: Any = EVERYTHING, ranks: int = 1, **how: Any) -> Outcome:
        functions = {name: f"{self.code}:{how.pop(name)}" for name in FUNCTIONS if name in how}
        tensor, estimated = how.pop("tensor", 1), "advantage_estimator" in algorithm
        shards = make_shards(
            samples,
            None if estimated else ADVANTAGES,
            BatchPlan(num_ranks=ranks // tensor, num_steps=2, **{"max_tokens": 40, **how}),
            rewards_B=ADVANTAGES if estimated else None,
            rollout=0,
            temperature=TEMPERATURE,
        )
        rollout = RolloutConfig(rollout_temperature=TEMPERATURE)
        config = settings(algorithm=algorithm).model_copy(update={"rollout": rollout})
        by_rank = [shards[rank // tensor] for rank in range(ranks)]
        outcomes = self.learners.train(config, self.folder, by_rank, ranks=ranks, tensor=tensor, functions=functions)
        return outcomes[0]


@pytest.fixture(scope="module")
def train(learners: Learners, qwen3: Path, code: Path) -> Trains:
    return Trains(learners, qwen3, code)


@pytest.fixture(scope="module")
def alone(train, siblings) -> Outcome:
    """What the core trains: clipped surrogate, k3 and entropy bonus."""
    return train(siblings)


@pytest.mark.parametrize("how", [{}, {"max_tokens": 1000}, {"ranks": 2}, {"ranks": 2, "tensor": 2}], ids=str)
def test_a_loss_that_computes_what_the_core_computes_trains_the_same(train, siblings, alone, how) -> None:
    outcome = train(siblings, custom_loss_function_path="surrogate", **how)
    assert distance(outcome.weights, alone.weights) < NEAR
    for name in ("train/loss", "train/pg_loss", "train/kl_loss", "train/grad_norm", "train/entropy_loss"):
        assert outcome.metrics[0][name] == pytest.approx(alone.metrics[0][name], rel=1e-5), name


@pytest.mark.parametrize(
    ("per_token", "function"),
    [
        (True, {"custom_loss_function_path": "surrogate"}),
        (True, {"custom_pg_loss_reducer_function_path": "mean_of_samples"}),
        (False, {"custom_pg_loss_reducer_function_path": "mean_of_samples"}),
    ],
    ids=["loss, per token", "reducer, per token", "reducer"],
)
def test_a_loss_and_a_reducer_average_as_the_run_does(train, samples, per_token, function) -> None:
    how = {"algorithm": {**EVERYTHING, "calculate_per_token_loss": per_token}, "per_token": per_token}
    expected, outcome = train(samples, **how), train(samples, ranks=2, **how, **function)
    assert distance(outcome.weights, expected.weights) < NEAR
    assert outcome.metrics[0]["train/pg_loss"] == pytest.approx(expected.metrics[0]["train/pg_loss"], rel=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_advantages_that_a_function_sets_are_trained(train, siblings, alone, ranks) -> None:
    algorithm = {**EVERYTHING, "advantage_estimator": "custom_advantage_function_path"}
    outcome = train(siblings, algorithm=algorithm, custom_advantage_function_path="given", ranks=ranks)
    assert distance(outcome.weights, alone.weights) < NEAR
    assert outcome.metrics[0]["train/pg_loss"] == pytest.approx(alone.metrics[0]["train/pg_loss"], rel=1e-5)


@pytest.mark.parametrize(
    "function",
    [{"custom_tis_function_path": "unchanged"}, {"custom_model_provider_path": "provider"}, {"spec": "layers"}],
    ids=lambda function: "".join(function),
)
def test_a_correction_that_changes_nothing_and_a_model_of_the_family_train_the_same(
    train, siblings, alone, function
) -> None:
    outcome = train(siblings, **function)
    assert outcome.metrics == alone.metrics
    assert distance(outcome.weights, alone.weights) == 0.0


def test_a_correction_that_rejects_everything_leaves_no_gradient(train, siblings) -> None:
    outcome = train(siblings, custom_tis_function_path="reject_everything")
    assert outcome.metrics[0]["train/grad_norm"] == 0.0


@pytest.mark.parametrize(
    ("spec", "error", "named"),
    [
        ("without_mlp", CheckpointError, r"pre_mlp_layernorm\.weight"),
        ("no_spec", PluginError, "--custom-model-provider-path"),
    ],
)
def test_a_spec_that_has_no_place_for_a_weight_or_is_none_is_refused(train, siblings, spec, error, named) -> None:
    with pytest.raises(error, match=named):
        train(siblings, spec=spec)


def test_megatron_hooks_are_called_in_order_with_what_slime_hands_over(train, code, siblings, alone) -> None:
    outcome = train(
        siblings,
        custom_megatron_init_path="started",
        custom_megatron_before_log_prob_hook_path="before_log_probs",
        custom_megatron_before_train_step_hook_path="before_step",
    )
    assert outcome.metrics == alone.metrics
    calls = json.loads(code.with_suffix(".json").read_text())
    (parameters,) = {call[1] for call in calls[1:3]}
    assert parameters > 10
    assert calls == ["start", ["ref_", parameters], ["", parameters], [0, 0, 3e-3, 3e-3], [0, 1, 3e-3, 3e-3]]
