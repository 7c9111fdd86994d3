"""Frozen models, frozen weights and an optimizer that is reset, in real learners.

A learner takes over its process, so every scenario has its own, forked from one that has imported the engines.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray import cloudpickle

from slime_core.config.learning import AlgorithmConfig, OptimizerConfig
from slime_core.config.schema import ClusterConfig, ModelConfig, RunConfig
from slime_core.errors import ConfigError, NonFiniteError, SlimeError
from slime_core.rollout.shards import BatchPlan, make_shards
from slime_core.types import Sample, Status, TrainBatch
from slime_core.weights.engine_control import reserve_port
from tests.checkpoints import write_copies

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the children cannot import test files

TIMEOUT_S = 300
VOCABULARY = 48
KL = {"use_kl_loss": True, "kl_loss_coef": 0.05, "kl_loss_type": "k3"}

Make = Any
"""A :class:`Maker`."""


class Maker:
    """Makes learners in a child, one after the other.

    Arguments:
        folder: of the start weights.
        addresses: one a learner, where its ranks meet.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, addresses: list[str], pipeline: int) -> None:
        self._folder, self._rank, self.world_size, self._addresses = folder, rank, world_size, list(addresses)
        self._pipeline, self._learner = pipeline, None

    def __call__(
        self, *, folder: Path | None = None, model: Any = None, optimizer: Any = None, **algorithm: Any
    ) -> Any:
        from slime_core.learner import LearnerSettings
        from slime_core.learner.rank import Learner
        from slime_core.modeling.layout import ParallelLayout
        from slime_core.plugins.activation import activate

        self.close()
        config = RunConfig(
            cluster=ClusterConfig(device="cpu"),
            algorithm=AlgorithmConfig(**algorithm),
            model=ModelConfig(**(model or {})),
            optimizer=OptimizerConfig(**{"lr": 3e-3, "adam_eps": 1e-5, **(optimizer or {})}),
        )
        settings = LearnerSettings(
            config,
            folder or self._folder,
            "Qwen3ForCausalLM",
            "clipped",
            100,
            rank=self._rank,
            world_size=self.world_size,
            address=self._addresses.pop(),
            num_threads=1,
            layout=ParallelLayout(pipeline=self._pipeline),
        )
        self._learner = Learner(settings, activate([], architecture="Qwen3ForCausalLM").registry)
        return self._learner

    def close(self) -> None:
        """Leave the groups of the last learner, also of one that could not be made."""
        self._learner = None
        if torch.distributed.is_initialized():
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


class InForkserver:
    """Runs where it is unpickled, because functions of a test file have no name there."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, *arguments

    def __reduce__(self) -> Any:
        return _call, self.call


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def _prepare() -> int:
    """Import what every rank needs, before any of them is forked; the id of the process."""
    from slime_core.cpu.megatron import install

    install()
    torch.set_num_threads(1)
    import mbridge  # noqa: F401
    import transformers  # noqa: F401

    import slime_core.checkpoint.sharded
    import slime_core.learner.critic
    import slime_core.learner.rank  # noqa: F401

    return os.getpid()


def _on_forked_ranks(scenario: Callable[..., Any], folder: Path, addresses: list[str], num_ranks: int) -> list[bytes]:
    """What each of the ranks has to say, in bytes; stops waiting as soon as one of them failed."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
    ranks = [
        context.Process(target=_carry_out, args=(scenario, pipe, folder, rank, num_ranks, addresses, num_ranks))
        for rank, (_, pipe) in enumerate(pipes)
    ]
    for rank, (_, pipe) in zip(ranks, pipes, strict=True):
        rank.start()
        pipe.close()
    try:
        return _answers({reader: rank for (reader, _), rank in zip(pipes, ranks, strict=True)})
    finally:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid or 0, signal.SIGKILL)
            rank.join()


def _answers(waiting: dict[Any, Any]) -> list[bytes]:
    answers = dict.fromkeys(waiting, b"")
    deadline = time.monotonic() + TIMEOUT_S
    while waiting:
        ready = wait(list(waiting), timeout=deadline - time.monotonic())
        if not ready:
            return [cloudpickle.dumps((None, AssertionError(f"{len(waiting)} ranks hang after {TIMEOUT_S} s")))]
        for reader in ready:
            answers[reader] = _answer(reader, waiting.pop(reader))
            if cloudpickle.loads(answers[reader])[1] is not None:
                return [answers[reader]]
    return list(answers.values())


def _answer(reader: Any, rank: Any) -> bytes:
    try:
        answer: bytes = reader.recv_bytes()
    except EOFError:
        rank.join()
        return cloudpickle.dumps((None, AssertionError(f"a rank died with exit code {rank.exitcode}")))
    return answer


def _carry_out(scenario: Callable[..., Any], pipe: Any, *place: Any) -> None:
    """Sends what the scenario returns and the error that ended it, one of them None, in bytes.

    An error of a library goes as its text: one of Megatron cannot be unpickled where Megatron is not prepared.
    """
    os.setpgrp()  # with what it starts, so that all of it can be ended
    make, found, error = Maker(*place), None, None
    try:
        found = scenario(make)
    except SlimeError as caught:
        error = caught
    except Exception:
        error = AssertionError(traceback.format_exc())
    pipe.send_bytes(cloudpickle.dumps((found, error)))


class Children:
    """Ranks of learners, forked for each scenario from one process that has imported the engines."""

    def __init__(self, folder: Path) -> None:
        self._forkserver = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        self._pid = self._inside(_prepare)
        self.folder = self.model(folder, seed=0)

    def model(self, target: Path, *, seed: int, **fields: Any) -> Path:
        """``target``, where a model with random weights was saved."""
        return Path(self._inside(random_model, target, seed, fields))

    def __call__(self, scenario: Callable[..., Any], *, pipeline: int = 1, num_learners: int = 4) -> list[Any]:
        """What ``scenario(make)`` returns on every rank; raises what one of them raises first."""
        addresses = [f"127.0.0.1:{self._inside(reserve_port, '127.0.0.1')}" for _ in range(num_learners)]
        answers = self._inside(_on_forked_ranks, scenario, self.folder, addresses, pipeline)
        outcomes = [cloudpickle.loads(answer) for answer in answers]
        for error in (error for _, error in outcomes if error is not None):
            raise error
        return [found for found, _ in outcomes]

    def _inside(self, function: Callable[..., Any], *arguments: Any) -> Any:
        call = cloudpickle.dumps(InForkserver(function, *arguments))
        return self._forkserver.submit(cloudpickle.loads, call).result(timeout=2 * TIMEOUT_S)

    def stop(self) -> None:
        """Ends it, also while it waits."""
        os.kill(self._pid, signal.SIGKILL)
        self._forkserver.shutdown(cancel_futures=True)


def random_model(target: Path, seed: int, fields: dict[str, Any]) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen3Config(
        **sizes | {"vocab_size": VOCABULARY, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64},
        initializer_range=0.1,
        **{"tie_word_embeddings": False, **fields},
    )
    Qwen3ForCausalLM(config).save_pretrained(target)
    return target


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Children]:
    found = Children(tmp_path_factory.mktemp("model"))
    yield found
    found.stop()


@pytest.fixture(scope="module")
def other(children: Children, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    return children.model(tmp_path_factory.mktemp("other"), seed=1)


def samples() -> list[Sample]:
    random = np.random.default_rng(0)
    lengths = [(int(random.integers(1, 6)), int(random.integers(1, 9))) for _ in range(8)]
    return [
        Sample(
            group_index=index // 4,
            index=index,
            tokens=random.integers(0, VOCABULARY, prompt + response).tolist(),
            response_length=response,
            rollout_log_probs=[-3.0] * response,
            status=Status.COMPLETED,
        )
        for index, (prompt, response) in enumerate(lengths)
    ]


ADVANTAGES = np.random.default_rng(1).normal(size=8).astype(np.float32)


def shard(rollout: int = 0, *, num_steps: int = 1, scale: float = 1.0) -> TrainBatch:
    """One rollout for one rank, one micro-batch a step."""
    (found,) = make_shards(
        samples(),
        scale * ADVANTAGES,
        BatchPlan(num_ranks=1, num_steps=num_steps, max_tokens=1000),
        rollout=rollout,
        temperature=0.7,
    )
    return found


def weights(learner: Any) -> dict[str, torch.Tensor]:
    return {name: weight.float().clone() for name, weight in learner.export_weights()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def trained(learner: Any, batch: TrainBatch) -> tuple[dict[str, float], int]:
    """The metrics of a rollout, and how many micro-batches went through the model for it."""
    passed: list[int] = []
    handle = learner.actor.chunks[0].register_forward_pre_hook(lambda *_: passed.append(1))
    metrics = learner.train(batch)
    handle.remove()
    return metrics, len(passed)


# --- Passes -----------------------------------------------------------------------------------------------------------


def test_only_columns_that_are_read_cost_a_pass(children, other):
    """One micro-batch a step; a rollout of two steps trains two and annotates two."""

    def count(make: Make) -> list[list[int]]:
        cases = (
            {},
            KL,
            {"use_opd": True, "opd_teacher_load": other},
            {**KL, "use_opd": True, "opd_teacher_load": other},
        )
        learners = (make(**case) for case in cases)
        return [[trained(one, shard())[1], trained(one, shard(1, num_steps=2))[1]] for one in learners]

    (found,) = children(count)
    assert found == [[1, 2 + 2], [2, 4 + 2], [2, 4 + 2], [3, 6 + 2]]


# --- Reference --------------------------------------------------------------------------------------------------------


def test_a_reference_that_changes_is_saved_and_resumed_bit_for_bit(children, tmp_path):
    plain = tmp_path / "plain"

    def resume(make: Make) -> tuple[list[dict[str, float]], dict[str, float], list[str], bool]:
        refreshed = {**KL, "ref_update_interval": 2}
        learner = make(**refreshed)
        metrics = []
        for rollout in range(4):
            if rollout == 3:
                before = weights(learner)
                write_copies(learner.copy(tmp_path))
                untouched = equal(before, weights(learner))
            metrics.append(learner.train(shard(rollout)))
        learner = make(**refreshed)
        learner.load(tmp_path)
        resumed = learner.train(shard(3))
        write_copies(make(**KL).copy(plain))
        return metrics, resumed, sorted(os.listdir(tmp_path / "roles")), untouched

    ((metrics, resumed, saved, untouched),) = children(resume)
    divergences = [one["train/kl_loss"] for one in metrics]
    assert divergences[0] == divergences[2] == 0.0  # the start, and the copy made after two rollouts
    assert min(divergences[1], divergences[3]) > 1e-6
    assert resumed == metrics[3]
    assert saved == ["reference"]
    assert untouched
    assert not (plain / "roles").exists()  # the start weights, which nothing changes


# --- Old actor --------------------------------------------------------------------------------------------------------


def test_old_log_probs_are_those_of_the_published_actor(children):
    """Published before rollouts 0 and 2, as with an interval of 2."""

    def measure(make: Make) -> list[list[tuple[float, int]]]:
        found = []
        for kept in (True, False):
            learner, rollouts = make(keep_old_actor=kept), []
            for rollout in range(3):
                if rollout % 2 == 0:
                    learner.published(rollout)
                metrics, passes = trained(learner, shard(rollout))
                rollouts.append((metrics["train/ppo_kl"], passes))
            found.append(rollouts)
        return found

    ((kept, current),) = children(measure)
    assert current == [(0.0, 1)] * 3
    assert kept[0] == kept[2] == (0.0, 1)  # the copy is the actor: no pass for it
    moved, passes = kept[1]
    assert abs(moved) > 1e-4
    assert passes == 2


# --- Teacher ----------------------------------------------------------------------------------------------------------


def log_probs(folder: Path) -> list[torch.Tensor]:
    """By transformers, of every sample's response, at the temperature of the rollout."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for sample in samples():
        ids = torch.tensor(sample.tokens)
        with torch.no_grad():
            logits_TV = model(ids[None]).logits[0, sample.prompt_length - 1 : -1] / 0.7
        found.append(logits_TV.log_softmax(-1).gather(1, ids[sample.prompt_length :, None])[:, 0])
    return found


def test_the_divergence_from_the_teacher_is_that_of_transformers(children, other):
    start = children.folder

    def distil(make: Make) -> tuple[dict[str, float], bool, float]:
        pairs = zip(log_probs(start), log_probs(other), strict=True)
        expected = float(np.mean([(student - teacher).mean().item() for student, teacher in pairs]))
        learner = make(use_opd=True, opd_teacher_load=other, opd_kl_coef=0.5)
        before = weights(learner)
        return learner.train(shard(scale=0.0)), equal(before, weights(learner)), expected

    ((metrics, unchanged, expected),) = children(distil)
    assert metrics["train/opd_reverse_kl"] == pytest.approx(expected, rel=1e-4)
    assert not unchanged  # with advantages of 0, the teacher alone teaches


def test_a_teacher_that_computes_differently_is_refused(children, tmp_path):
    """The weights have the same shapes; only the base of the rotary positions differs."""
    children.model(tmp_path, seed=1, rope_theta=77.0)

    def build(make: Make) -> None:
        make(use_opd=True, opd_teacher_load=tmp_path)

    with pytest.raises(ConfigError, match=rf"the teacher of {tmp_path} .*rope_parameters = .*77\.0"):
        children(build)


# --- Freezing ---------------------------------------------------------------------------------------------------------

FROZEN = {"freeze_params_name_list": ("embedding", r"layers\.0\.")}
"""All of the first of two pipeline stages."""


def moved(start: dict[str, torch.Tensor], end: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in start if not torch.equal(start[name], end[name])}


def test_only_the_chosen_weights_change_and_a_resume_is_exact(children, tmp_path):
    only = {"only_train_params_name_list": (r"layers\.1\.mlp", "final_layernorm")}

    def train(make: Make) -> tuple[set[str], bool]:
        learner = make(optimizer=only)
        start = weights(learner)
        learner.train(shard())
        write_copies([learner.actor.copy(tmp_path / "torch_dist")])
        learner.train(shard(1))
        end = weights(learner)
        learner = make(optimizer=only)
        learner.actor.load(tmp_path / "torch_dist")
        learner.train(shard(1))
        return moved(start, end), equal(end, weights(learner))

    ((changed, exact),) = children(train)
    parts = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert changed == {f"model.layers.1.{part}.weight" for part in parts} | {"model.norm.weight"}
    assert exact


@pytest.mark.long
def test_a_pipeline_rank_that_trains_nothing_keeps_up(children, tmp_path):
    """Untied, where it also resumes, and tied, where the last stage holds a copy of what the first one froze."""
    models = {tied: children.model(tmp_path / f"{tied}", seed=2, tie_word_embeddings=tied) for tied in (False, True)}
    parts = tmp_path / "torch_dist"
    parts.mkdir()

    def run(learner: Any, folder: Path | None) -> tuple[set[str], dict[str, torch.Tensor], list[float]]:
        start, norms = weights(learner), [learner.train(shard())["train/grad_norm"]]
        if folder is not None:
            write_copies([learner.actor.copy(folder)])
        if learner.offload() == 0:
            raise AssertionError("nothing was given away")
        learner.onload()
        norms.append(learner.train(shard(1))["train/grad_norm"])
        end = weights(learner)
        return moved(start, end), end, norms

    def train(make: Make) -> tuple[dict[bool, Any], bool]:
        folder = parts if make.world_size > 1 else None
        found = {True: run(make(folder=models[True], optimizer=FROZEN), None)}
        found[False] = run(make(folder=models[False], optimizer=FROZEN), folder)
        if folder is None:
            return found, True
        learner = make(folder=models[False], optimizer=FROZEN)
        learner.actor.load(folder)
        learner.train(shard(1))
        return found, equal(found[False][1], weights(learner))

    ((whole, _),) = children(train)
    for split, exact in children(train, pipeline=2):
        assert exact
        for tied in (False, True):
            assert split[tied][0] == whole[tied][0]
            assert distance(split[tied][1], whole[tied][1]) < 1e-5
            assert split[tied][2] == pytest.approx(whole[tied][2], rel=1e-5)
    for tied in (False, True):
        changed = whole[tied][0]
        assert "model.embed_tokens.weight" not in changed
        assert not any(name.startswith("model.layers.0.") for name in changed)
        assert ("lm_head.weight" in changed) is not tied


def test_a_name_that_is_not_there_is_refused(children):
    def build(make: Make) -> None:
        make(optimizer={"freeze_params_name_list": ("embeding",)})

    with pytest.raises(ConfigError, match=r"freeze_params_name_list: 'embeding' .* embedding"):
        children(build)


# --- An optimizer that forgets ----------------------------------------------------------------------------------------


def test_a_reset_optimizer_is_a_new_one_in_each_rollout(children):
    def train(make: Make) -> list[float]:
        def second_rollout(**optimizer: Any) -> Any:
            learner = make(optimizer=optimizer)
            learner.train(shard())
            return learner

        forgetful = second_rollout(reset_optimizer_states=True)
        between = weights(forgetful)
        halfway = [parameter.detach().clone() for parameter in forgetful.actor.chunks[0].parameters()]
        forgetful.train(shard(1, num_steps=2))
        found = weights(forgetful)
        plain = second_rollout()
        plain.train(shard(1, num_steps=2))
        kept = weights(plain)
        fresh = make()
        with torch.no_grad():
            for parameter, value in zip(fresh.actor.chunks[0].parameters(), halfway, strict=True):
                parameter.copy_(value)
        same_start = distance(between, weights(fresh))
        fresh.train(shard(1, num_steps=2))
        return [same_start, distance(found, weights(fresh)), distance(found, kept)]

    ((same_start, from_fresh, from_kept),) = children(train)
    assert same_start == 0.0
    assert from_fresh == 0.0
    assert from_kept > 1e-4


# --- What is not finite -----------------------------------------------------------------------------------------------


def test_a_step_that_spoils_the_weights_ends_the_run(children):
    def train(make: Make) -> None:
        make(optimizer={"lr": 3.3e38, "weight_decay": 1.0, "adam_beta1": 0.0}).train(shard(5))

    with pytest.raises(NonFiniteError, match=r"rollout 5: .* \d+ weights .*--load"):
        children(train)


def test_a_gradient_that_is_not_finite_ends_the_run(children):
    def train(make: Make) -> None:
        learner = make()
        learner.actor.chunks[0].decoder.final_layernorm.weight.register_hook(lambda gradient: gradient * math.nan)
        learner.train(shard(5))

    with pytest.raises(NonFiniteError, match=r"rollout 5: not finite .*: grad_norm\."):
        children(train)


@pytest.mark.parametrize(
    ("settings", "column"),
    [({"use_kl_loss": True}, "kl_loss"), ({"use_opd": True}, "loss, opd_reverse_kl, pg_loss")],
)
def test_a_frozen_model_with_weights_that_are_not_finite_ends_the_run(children, tmp_path, settings, column):
    """Nothing is trained by it, also where the divergence is only measured."""
    from safetensors.torch import load_file, save_file

    spoilt = children.model(tmp_path, seed=1)
    held = load_file(spoilt / "model.safetensors")
    held["model.norm.weight"][3] = math.nan
    save_file(held, spoilt / "model.safetensors", metadata={"format": "pt"})
    where = {"model": {"ref_load": spoilt}} if "use_kl_loss" in settings else {"opd_teacher_load": spoilt}

    def train(make: Make) -> None:
        make(**settings, **where).train(shard(5))

    with pytest.raises(NonFiniteError, match=rf"rollout 5: not finite \(NaN or infinity\): .*{column}"):
        children(train)


def test_advantages_that_are_not_finite_end_the_run(children):
    def train(make: Make) -> None:
        batch = shard(5)
        make().train(replace(batch, columns_B={"advantages": np.full(8, math.inf, np.float32)}))

    with pytest.raises(NonFiniteError, match=r"rollout 5: not finite .*pg_loss"):
        children(train)
