"""A run of two learner ranks and two engines at learning rate 0: functions by path do what components do otherwise."""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime_core.config.schema import ARITHMETIC
from tests.e2e.conftest import Finished, train, weights
from tests.http_service import HttpService

OF_ROLLOUTS = '''
    """What a user of slime brings along, with the import of Sample changed."""

    import json
    import random
    from pathlib import Path

    from slime_core import Sample
    from slime_compat import GenerateState, post


    class DataSource:
        def __init__(self, args):
            self.args, self.next, self.buffer = args, 0, []
            self.rows = [json.loads(line) for line in Path(args.prompt_data).read_text().splitlines()]
            random.Random(args.rollout_seed).shuffle(self.rows)

        def get_samples(self, num_samples):
            groups, self.buffer = self.buffer[:num_samples], self.buffer[num_samples:]
            while len(groups) < num_samples:
                row = self.rows[self.next % len(self.rows)]
                size = range(self.args.n_samples_per_prompt)
                groups.append([Sample(prompt=row["prompt"], label=row["label"]) for _ in size])
                self.next += 1
            return groups

        def add_samples(self, samples):
            self.buffer.extend(samples)

        def __len__(self):
            return len(self.rows)


    async def generate(args, sample, sampling_params, evaluation=False):
        tokenizer = GenerateState(args).tokenizer
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
        sample.tokens = tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
        for turn in range(args.max_turns):
            payload = {"input_ids": list(sample.tokens), "sampling_params": sampling_params, "return_logprob": True}
            answer = await post(url, payload)
            sampled = answer["meta_info"]["output_token_logprobs"]
            ids = [token[1] for token in sampled]
            text = tokenizer.decode(ids, skip_special_tokens=True)
            log_probs = [token[0] for token in sampled]
            sample.append_response_tokens(
                args, tokens=ids, log_probs=log_probs, meta_info=answer["meta_info"], text=text
            )
            if turn + 1 < args.max_turns and sample.status == Sample.Status.COMPLETED:
                prompt_ids = tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
                sample.append_response_tokens(args, tokens=prompt_ids, trainable=False, text=" ")
        return sample


    def tag(args, sample, *, rollout_id=None):
        sample.metadata["turns"] = sample.response.count(" ") + 1
        sample.metadata["rollout"] = rollout_id


    async def reward_func(args, sample, **kwargs):
        return args.bonus * float(sample.label in sample.response.split())


    def not_all_alike(args, samples):
        return len({sample.get_reward_value(args) for sample in samples}) > 1 or samples[0].index % 3 == 0


    def log(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
        rollout_extra_metrics["mine/turns"] = sum(sample.metadata["turns"] for sample in samples) / len(samples)
        return False
'''
OF_RANKS = """
import json
from pathlib import Path

import torch


def note(args, what, *more):
    with (Path(args.output_dir) / f"calls-{args.rank}.jsonl").open("a") as file:
        print(json.dumps([what, *more]), file=file)


def started(args):
    note(args, "start", args.world_size, args.bonus)


def before_log_probs(args, model, store_prefix):
    note(args, "log_probs", store_prefix, len(model))


def before_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    note(args, "step", rollout_id, step_id)


def advantages(args, rollout_data):
    note(args, "advantages", sorted(rollout_data))
    pairs = zip(rollout_data["rewards"], rollout_data["loss_masks"])
    rollout_data["advantages"] = [torch.full_like(mask, reward) for reward, mask in pairs]
    rollout_data["returns"] = rollout_data["advantages"]


def postprocess(args, rollout_id, rollout_data):
    lengths = rollout_data["response_lengths"]
    note(args, "postprocess", rollout_id, len(lengths), sorted(rollout_data))
    assert [len(one) for one in rollout_data["log_probs"]] == lengths
    found = {round(value, 4) for one in rollout_data["advantages"] for value in one.tolist()}
    note(args, "found", sorted(found))
    rollout_data["advantages"] = [one + args.bonus for one in rollout_data["advantages"]]
    rollout_data["loss_masks"][0][:] = 0


def weigh(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths):
    ratio = (torch.cat(train_log_probs) - torch.cat(rollout_log_probs)).exp()
    return pg_loss * ratio.clamp(max=2.0), loss_masks, {"tis": ratio}


def written(args, version_dir, rollout_engines):
    names = sorted(path.name for path in Path(version_dir).iterdir())
    note(args, "written", Path(version_dir).name, "model.safetensors" in names, len(rollout_engines))
"""
OF_ROLLOUTS_BY = {
    "data-source-path": "DataSource",
    "custom-generate-function-path": "generate",
    "rollout-sample-hook-path": "tag",
    "custom-rm-path": "reward_func",
    "dynamic-sampling-filter-path": "not_all_alike",
    "custom-rollout-log-function-path": "log",
}
OF_RANKS_BY = {
    "custom-megatron-init-path": "started",
    "custom-megatron-before-log-prob-hook-path": "before_log_probs",
    "custom-megatron-before-train-step-hook-path": "before_step",
    "custom-advantage-function-path": "advantages",
    "rollout-data-postprocess-path": "postprocess",
    "custom-tis-function-path": "weigh",
    "custom-update-weight-post-write-path": "written",
}
SHAPE = "--num-rollout 2 --num-steps-per-rollout 2 --actor-num-gpus-per-node 2 --rollout-num-gpus 2 --lr 0"
GROUPS = [{"num_gpus": 1, "overrides": {"max_running_requests": requests}} for requests in (24, 48)]
"""Two engines with settings of their own."""

TOKEN = "e2e-t0ken-of-a-service"


@pytest.fixture(scope="module")
def service() -> Iterator[HttpService]:
    """A reward service: 1 where the response equals the label; a test compares the token of its requests."""
    with HttpService(lambda body: float(body["response"].strip() == body["label"])) as service:
        yield service


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, service: HttpService) -> Finished:
    """Two rollouts of 32 samples of two turns; the service rewards the evaluation."""
    home = tmp_path_factory.mktemp("paths")
    (home / "mine.yaml").write_text("bonus: 0.5\n")
    held_out = f"{ARITHMETIC / 'data' / 'held_out.jsonl'}@[0:16]"
    few = f"name = 'few', path = '{held_out}', rm_type = 'remote_rm'"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("E2E_RM_TOKEN", TOKEN)
        return train(
            home / "run",
            *_named(home / "rollouts.py", OF_ROLLOUTS, OF_ROLLOUTS_BY),
            *_named(home / "ranks.py", OF_RANKS, OF_RANKS_BY),
            *SHAPE.split(),
            *["--engine-groups", *map(json.dumps, GROUPS)],
            *["--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--max-turns", "2"],
            *["--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-loss-type", "k3"],
            *["--update-weight-transport", "disk"],
            *["--eval-prompt-data", "none", "--eval-datasets", few],
            *["--rm-url", service.url, "--rm-token-env", "E2E_RM_TOKEN"],
            *["--custom-config-path", home / "mine.yaml"],
        )


def _named(file: Path, code: str, functions: dict[str, str]) -> list[str]:
    file.write_text(textwrap.dedent(code))
    return [word for name, function in functions.items() for word in (f"--{name}", f"{file}:{function}")]


def calls(run: Finished, rank: int) -> list[list[Any]]:
    return [json.loads(line) for line in (run.folder / f"calls-{rank}.jsonl").read_text().splitlines()]


def test_functions_of_ranks_are_called_in_the_order_of_a_run_with_what_slime_hands_over(run) -> None:
    ranks = [calls(run, rank) for rank in range(2)]
    of_a_rollout = ["log_probs", "log_probs", "advantages", "postprocess", "found", "step", "step", "written"]
    for made in ranks:
        assert [call[0] for call in made] == ["start", "written", *of_a_rollout, *of_a_rollout]
    first, second = ({name: [call[1:] for call in made if call[0] == name] for name, *_ in made} for made in ranks)
    assert second["start"] == [[2, 0.5]]
    assert second["log_probs"] == [["ref_", 1], ["", 1]] * 2
    assert second["step"] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert second["written"] == [[f"version-{version}", True, 2] for version in range(3)]
    # Ranks get as many tokens as each other, not as many samples.
    (rollout, samples, columns), (other_rollout, others, _) = first["postprocess"][0], second["postprocess"][0]
    assert (rollout, other_rollout, samples + others) == (0, 0, 32)
    assert min(samples, others) > 0
    assert {"tokens", "loss_masks", "advantages", "log_probs", "ref_log_probs", "rollout_log_probs"} <= {*columns}
    ((advantages, *_), *_) = second["advantages"]
    assert {"tokens", "loss_masks", "rewards", "log_probs", "kl", "rollout_log_probs"} <= {*advantages}
    rewards = [values for (values,) in first["found"] + second["found"]]
    assert {value for values in rewards for value in values} == {0.0, 0.5}  # rewards as they are


def test_return_values_of_functions_are_trained_and_reported(run) -> None:
    assert Counter(row["step"] for row in run.rows if "train/tis" in row) == {0: 1, 1: 1}
    for row in run.rows[:2]:
        # Trainer and engine agree on the CPU, so each ratio is 1; each rank leaves one of the 32 samples out.
        assert row["train/tis"] == pytest.approx(30 / 32, rel=1e-4)


def test_every_function_of_the_rollouts_did_its_part(run) -> None:
    samples = [sample for step in range(2) for sample in run.samples(f"train-{step:06d}.jsonl")]
    assert {sample["reward"] for sample in samples} <= {0.0, 0.5}
    assert {sample["metadata"]["rollout"] for sample in samples} == {0, 1}
    two = [sample for sample in samples if sample["metadata"]["turns"] == 2]
    assert len(two) > 32
    assert all(sample["reward"] == 0.5 * (sample["label"] in sample["response"].split()) for sample in samples)
    assert [row["mine/turns"] > 1.5 for row in run.rows[:2]] == [True] * 2
    dropped = sum(row.get("rollout/dropped/filtered", 0) for row in run.rows[:2])
    assert len(samples) == 2 * 32 + 4 * dropped


def test_the_trainer_agrees_with_the_engines_and_learning_rate_zero_leaves_the_weights_bit_for_bit(run) -> None:
    for row in run.rows[:2]:
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-5
        assert row["train/train_rollout_logprob_max_diff"] < 1e-3
        assert row["train/grad_norm"] > 0
        assert row["train/kl_loss"] == 0.0
    assert weights(run.checkpoint(2) / "hf") == weights(ARITHMETIC / "model")


def test_the_code_is_in_the_record_of_the_run(run) -> None:
    recorded = json.loads((run.folder / "plugins.json").read_text())
    # The evaluation set `few` names a reward of slime-rewards.
    names = {"core", "grpo", "compat", "datasets", "rewards", "models"}
    assert {entry["name"] for entry in recorded["plugins"]} == names
    named = sorted(name.replace("-", "_") for name in (*OF_ROLLOUTS_BY, *OF_RANKS_BY))
    assert sorted(entry["name"] for entry in recorded["functions"]) == named
    assert "compat" in run.output.splitlines()[0]


def test_each_engine_has_the_settings_of_its_group(run) -> None:
    logs = [(run.folder / "logs" / f"engine-{number}.log").read_text() for number in (0, 1)]
    assert [re.findall(r"'max_running_requests': (\d+)", log)[0] for log in logs] == ["24", "48"]


def test_the_secret_of_a_service_stands_in_nothing_that_a_run_writes_or_says(run, service) -> None:
    assert set(service.authorized) == {f"Bearer {TOKEN}"}
    scored = run.samples("eval-few-000000.jsonl")
    assert all(one["reward"] == float(one["response"].strip() == one["label"]) for one in scored)
    assert [path for path in run.folder.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()] == []
    assert TOKEN not in run.output + run.errors
