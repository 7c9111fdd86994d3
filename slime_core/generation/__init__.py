"""PUBLIC. What generate functions are written with.

    context     GenerateContext, and the Protocols Client, Encoder and InputProcessor that it holds; Parents: which of
                the given samples each returned one was made from; generate_group: one turn for every sample of a group
    trajectory  Trajectory: one response, turn by turn
    sampling    SamplingParams: how tokens are sampled; Generation: what an engine answers; Kept: which tokens top-p and
                top-k left

The rule between them: token ids and log-probabilities stay exactly as the engine returned them. Text is decoded from
ids and never encoded again.
"""

from slime_core.generation.context import (
    Client,
    Encoder,
    GenerateContext,
    InputProcessor,
    Parents,
    ProcessedPrompt,
    generate_group,
)
from slime_core.generation.sampling import FinishReason, Generation, Kept, SamplingParams, joined, keep
from slime_core.generation.trajectory import BranchError, Interrupted, Trajectory, Turn

__all__ = [
    "BranchError",
    "Client",
    "Encoder",
    "FinishReason",
    "GenerateContext",
    "Generation",
    "InputProcessor",
    "Interrupted",
    "Kept",
    "Parents",
    "ProcessedPrompt",
    "SamplingParams",
    "Trajectory",
    "Turn",
    "generate_group",
    "joined",
    "keep",
]
