"""A live run in which functions by path do what components do otherwise."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from slime_core.config.embedded import ARITHMETIC
from tests.e2e.conftest import Finished, slime, train

MINE = '''
    """What a user of slime brings along, with the import of Sample changed."""

    import json
    import random
    from pathlib import Path

    from slime_core import Sample
    from slime_core.adapters import GenerateState, post


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
        turns = [{"role": "user", "content": sample.prompt}]
        sample.tokens = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        for turn in range(args.max_turns):
            payload = {"input_ids": list(sample.tokens), "sampling_params": sampling_params, "return_logprob": True}
            answer = await post(url, payload)
            drawn = answer["meta_info"]["output_token_logprobs"]
            ids = [token[1] for token in drawn]
            text = tokenizer.decode(ids, skip_special_tokens=True)
            log_probs = [token[0] for token in drawn]
            sample.append_response_tokens(
                args, tokens=ids, log_probs=log_probs, meta_info=answer["meta_info"], text=text
            )
            if turn + 1 < args.max_turns and sample.status == Sample.Status.COMPLETED:
                asked = tokenizer("<|user|>" + sample.prompt + "<|assistant|>", add_special_tokens=False)["input_ids"]
                sample.append_response_tokens(args, tokens=asked, trainable=False, text=" ")
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
PATHS = {
    "--data-source-path": "mine.py:DataSource",
    "--custom-generate-function-path": "mine.py:generate",
    "--rollout-sample-hook-path": "mine.py:tag",
    "--custom-rm-path": "mine.py:reward_func",
    "--dynamic-sampling-filter-path": "mine.py:not_all_alike",
    "--custom-rollout-log-function-path": "mine.py:log",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Three rollouts of two turns."""
    home = tmp_path_factory.mktemp("paths")
    (home / "mine.py").write_text(textwrap.dedent(MINE))
    (home / "mine.yaml").write_text("bonus: 0.5\n")
    words: list[str | Path] = [word for flag, path in PATHS.items() for word in (flag, str(home / path))]
    words += ["--max-turns", "2", "--custom-config-path", home / "mine.yaml"]
    words += ["--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--eval-prompt-data", "few", _few(home)]
    return train(home / "run", *words, "--num-rollout", "3")


def _few(home: Path) -> Path:
    rows = (ARITHMETIC / "data" / "held_out.jsonl").read_text().splitlines()[:16]
    (home / "few.jsonl").write_text("\n".join(rows))
    return home / "few.jsonl"


def test_every_function_did_its_part(run: Finished) -> None:
    samples = [sample for step in range(3) for sample in run.samples(f"train-{step:06d}.jsonl")]
    assert {sample["reward"] for sample in samples} <= {0.0, 0.5}
    assert {sample["metadata"]["rollout"] for sample in samples} == {0, 1, 2}
    two = [sample for sample in samples if sample["metadata"]["turns"] == 2]
    assert len(two) > 48
    assert all(sample["reward"] == 0.5 * (sample["label"] in sample["response"].split()) for sample in samples)
    assert [row["mine/turns"] > 1.5 for row in run.rows[:3]] == [True] * 3
    dropped = sum(row.get("rollout/dropped/filtered", 0) for row in run.rows)
    assert len(samples) == 3 * 32 + 4 * dropped


def test_the_trainer_agrees_with_the_engine_on_tokens_that_a_function_collected(run: Finished) -> None:
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-5 for row in run.rows[:3])
    assert all(row["train/grad_norm"] > 0 for row in run.rows[:3])


def test_the_code_is_in_the_record_of_the_run(run: Finished) -> None:
    recorded = json.loads((run.folder / "plugins.json").read_text())
    assert [entry["plugin"] for entry in recorded["plugins"]] == ["core", "grpo", "paths", "models"]
    named = sorted(flag.removeprefix("--").replace("-", "_") for flag in PATHS)
    assert sorted(entry["plugin"] for entry in recorded["functions"]) == named


def test_a_function_of_the_wrong_form_ends_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("async def reward(samples, args): ...\n")
    run = slime(
        tmp_path, "run", "--plugin", "grpo", "--custom-rm-path", tmp_path / "mine.py", "--output-dir", tmp_path / "o"
    )
    assert run.code == 2
    assert "async def reward(samples, args) cannot be called: " in run.errors
    assert "its parameter 1 is 'samples', where args is passed" in run.errors
    assert not (tmp_path / "o").exists()
