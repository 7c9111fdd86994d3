"""PUBLIC. What generate functions are written with.

    context     GenerateContext, and the Protocols Client, Encoder and InputProcessor that it holds
    trajectory  Trajectory: one response, turn by turn; generate_group: one turn for every sample of a group
    sampling    SamplingParams: how tokens are sampled
    response    Generation: what an engine answers
    kept        Kept: which tokens top-p and top-k left
    parents     Parents: which of the given samples each returned one was made from
    stops       where a response ends that was interrupted
    speculation  counters of speculative decoding
    outcome     how a response ended, as the status of its sample

The rule between them: token ids and log-probabilities stay exactly as the engine returned them. Text is decoded from
ids and never encoded again.
"""

from slime_core.generation.context import Client, Encoder, GenerateContext, InputProcessor, ProcessedPrompt
from slime_core.generation.kept import Kept, joined, keep
from slime_core.generation.parents import Parents
from slime_core.generation.response import FinishReason, Generation
from slime_core.generation.sampling import SamplingParams
from slime_core.generation.trajectory import Interrupted, Trajectory, Turn, generate_group

__all__ = [
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
