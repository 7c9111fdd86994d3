"""A task for `mini-swe-agent`, with the prompts and limits that it ships."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import yaml
from minisweagent import package_dir
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

task, how = sys.argv[1:]
config = yaml.safe_load(Path(package_dir, "config", {"tools": "mini.yaml", "text": "default.yaml"}[how]).read_text())
given = config.get("model", {}) | {"model_name": f"openai/{os.environ['MODEL']}", "cost_tracking": "ignore_errors"}
known = DefaultAgent.__init__.__kwdefaults__["config_class"].model_fields
agent = DefaultAgent(
    {"tools": LitellmModel, "text": LitellmTextbasedModel}[how](**given),
    LocalEnvironment(),
    **{name: value for name, value in config["agent"].items() if name in known},
)
print(agent.run(task)["submission"])
