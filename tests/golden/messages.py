"""Makes mistakes as a user makes them and prints what slime says, as JSON; ``test_messages.py`` keeps the snapshot.

Everything is deterministic: paths and ports are replaced, and no message depends on the machine.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import tempfile
from pathlib import Path

from slime_core.cli.main import main
from slime_core.config.load import load
from slime_core.config.schema import ARITHMETIC
from slime_core.errors import SlimeError
from slime_core.rollout.engines.external import discover
from slime_testing.fake_engine import FakeEngine

REPO = Path(__file__).parents[2]
MODEL = ARITHMETIC / "model"
PROMPTS = "--plugin grpo --prompt-data prompts.jsonl --rollout-max-response-len 8"
TERABYTE = 10**12

COMMANDS = {
    "a misspelled flag": "check --plugin grpo --rollout-bach-size 4",
    "a flag without its value": "check --plugin grpo --lr",
    "a value out of range": "check --plugin grpo --rollout-top-p 2",
    "several mistakes": "check --plugin grpo --lr fast --seed 1.5 --device gpu",
    "a flag that needs another": "check --plugin grpo --kl-loss-coef 0.1",
    "flags that exclude each other": "check --plugin grpo --colocate --async-buffer-size 2",
    "an unknown plugin": "check --plugin gpro",
    "a component that no plugin has": "check --plugin grpo --advantage-estimator grppo",
    "a misspelled key in a file": "check --plugin grpo --config typo.toml",
    "a custom function that is not in its file": "check --plugin grpo --custom-rm-path reward.py:score",
    "a prompt file that is not there": "check --plugin grpo --prompt-data missing.jsonl",
    "a row that is not JSON": f"check {PROMPTS}",
    "rows without the label": f"check {PROMPTS.replace('prompts', 'unlabelled')}",
    "a prompt longer than the context": f"check {PROMPTS.replace('prompts', 'long')}",
    "a chat template with an error": "check --plugin grpo --hf-checkpoint template --prompt-data good.jsonl "
    "--apply-chat-template --rollout-max-response-len 8",
    "an architecture without a model spec": "check --plugin grpo --hf-checkpoint mamba --rollout-max-response-len 8",
    "batches that do not add up": "check --plugin grpo --rollout-batch-size 8 --n-samples-per-prompt 4 "
    "--global-batch-size 10 --num-steps-per-rollout 3",
    "a layout that does not divide the ranks": "check --plugin grpo --actor-num-gpus-per-node 3 "
    "--pipeline-model-parallel-size 2",
    "a model that does not fit the memory": "check --plugin grpo --hf-checkpoint large --device cpu "
    "--rollout-max-response-len 8",
}


def messages() -> dict[str, str]:
    """Mistake -> exit code and message."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        _write_files()
        outcomes = {mistake: _outcome(line) for mistake, line in COMMANDS.items()}
        outcomes["an external engine with other settings"] = _external()
        replaced = {str(Path(name).resolve()): "<files>", str(REPO): "<repo>"}
        return {mistake: _without_places(text, replaced) for mistake, text in outcomes.items()}


def _write_files() -> None:
    good = '{"prompt": "1+2", "label": "3"}\n'
    rows = {
        "prompts": f'{good}\n{{"prompt": }}\n',
        "good": good * 8,
        "unlabelled": '{"prompt": "1+2"}\n',
        "long": good + json.dumps({"prompt": "1" * 130, "label": "1"}) + "\n",
    }
    for name, text in rows.items():
        Path(f"{name}.jsonl").write_text(text)
    Path("typo.toml").write_text("[optimizer]\nlearning_rate = 1e-6\n")
    Path("reward.py").write_text("def reward(sample):\n    return 0.0\n")
    for name, changes in {"template": {}, "mamba": {"architectures": ["MambaForCausalLM"]}, "large": {}}.items():
        shutil.copytree(MODEL, name)
        config = Path(name) / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    _enlarge(Path("large/model.safetensors"))
    Path("template/chat_template.jinja").write_text("{{ messages[0].content | shout }}")


def _enlarge(weights: Path) -> None:
    """Declare a terabyte of weights; the file is sparse and takes no room on the disk."""
    entry = {"dtype": "F32", "shape": [TERABYTE // 4], "data_offsets": [0, TERABYTE]}
    header = json.dumps({"model.embed_tokens.weight": entry}).encode()
    weights.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(weights, 8 + len(header) + TERABYTE)


def _outcome(line: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main(shlex.split(line))
    message = errors.getvalue()
    # Warnings before it name the versions of plugins.
    return f"$ slime {line}\n{message[message.rfind('slime: ') :]}exit code {code}"


def _external() -> str:
    with FakeEngine() as engine:
        engine.info = {"model_path": "other", "tp_size": 2, "dtype": "bfloat16", "architectures": ["LlamaForCausalLM"]}
        config = load(["--advantage-estimator", "toy"], check_rules=False).config
        try:
            discover([engine.url.removeprefix("http://")], config, MODEL)
        except SlimeError as error:
            return f"{type(error).__name__}: {error}".replace(engine.url, "http://<engine>")
    return "is accepted"


def _without_places(text: str, replaced: dict[str, str]) -> str:
    for place, name in replaced.items():
        text = text.replace(place, name)
    return re.sub(r"this machine has [\d.]+", "this machine has <number>", text)


if __name__ == "__main__":
    print(json.dumps(messages()))
