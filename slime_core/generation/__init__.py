"""PUBLIC. The classes and functions that generate functions use.

    context     GenerateContext, and the Protocols Client, Encoder and InputProcessor that it holds; Parents: maps each
                returned sample to the given sample that it was made from; generate_group: one turn for every sample of
                a group
    trajectory  Trajectory: one response, turn by turn
    sampling    SamplingParams: how tokens are sampled; Generation: one response of an engine; Kept: the
                truncated-sampling mask, the tokens that top-p and top-k left; keep: records it in a sample; joined:
                concatenates the masks of several parts of a response

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
