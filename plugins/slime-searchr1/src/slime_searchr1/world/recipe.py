"""How the checkpoint in ``model/`` came to be: the warm-up, as data and numbers, for any trainer of next-token models.

What the warm-up teaches is the form: a query between its tags, made of a relation and of a name that can be read; after
the passages another query or an answer; an answer that is one of the names that the passages hold. Which relation and
which name is left to chance: neither query nor answer depends on the question. Its worlds are others, made by the same
recipe with names that the world of the questions does not use, and so are its passages.

What reinforcement learning adds: to search for what the question asks, to search again where one fact is not enough,
and to answer with what the right passage says.

A trainer repeats it so: a new model of :func:`model_files`, weights initialised with ``WarmUp.seed``; each batch of
:func:`warm_up_batches` one step of AdamW on the mean cross-entropy over the turns of the model, prompt through the chat
template; learning rate :meth:`WarmUp.learning_rate`.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slime_searchr1.index import Index
from slime_searchr1.protocol import information
from slime_searchr1.world.task import (
    CONTEXT_LENGTH,
    EOS_ID,
    PAD_ID,
    RELATIONS,
    VOCABULARY,
    Fact,
    Question,
    World,
    invented,
    world,
)

__all__ = ["Piece", "WarmUp", "model_files", "warm_up_batches"]

TOP_K = 3
MAX_CHARS = 4000
WORDS = tuple(dict.fromkeys(relation for own in RELATIONS.values() for relation in own))


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The numbers of the warm-up.

    Arguments:
        steps: optimizer steps, at least 1.
        batch_size: trajectories a step.
        worlds: other worlds, from which questions and passages are taken.
        informed_share: probability, 0 to 1, that a query or an answer is the right one and not left to chance.
        again_share: probability, 0 to 1, that a second search follows the first.
        lr: peak learning rate.
        lr_warmup_steps: steps of linear rise; a cosine over all ``steps`` multiplies it and ends at zero.
        weight_decay, adam_beta1, adam_beta2: of AdamW.
        seed: of the trajectories and of the initial weights.
    """

    steps: int = 3000
    batch_size: int = 64
    worlds: int = 20
    informed_share: float = 0.0
    again_share: float = 0.5
    lr: float = 3e-3
    lr_warmup_steps: int = 100
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    seed: int = 0

    def learning_rate(self, step: int) -> float:
        """The learning rate of step ``step``, counted from 0."""
        rise = min(1.0, (step + 1) / self.lr_warmup_steps)
        return self.lr * rise * (1 + math.cos(math.pi * step / self.steps)) / 2


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a response: a turn of the model, or what a search returned.

    Arguments:
        text: as it stands in the response.
        is_trained: it is a turn of the model.
    """

    text: str
    is_trained: bool


def warm_up_batches(warm_up: WarmUp | None = None) -> Iterator[list[tuple[str, list[Piece]]]]:
    """Yield ``steps`` batches of (question, response); the same ``warm_up`` always yields the same ones."""
    numbers = warm_up or WarmUp()
    rng = random.Random(numbers.seed)
    taken = world().entities
    others = [_Other(invented(number, without=taken)) for number in range(numbers.worlds)]
    for _ in range(numbers.steps):
        yield [rng.choice(others).trajectory(rng, numbers) for _ in range(numbers.batch_size)]


class _Other:
    """One of the other worlds, with its own retriever."""

    def __init__(self, found: World) -> None:
        self._index = Index([fact.contents for fact in found.facts])
        self._questions = [*found.train, *found.held_out]
        self._objects = {(fact.subject, fact.relation): fact.object for fact in found.facts}
        self._facts = {fact.contents: fact for fact in found.facts}

    def trajectory(self, rng: random.Random, numbers: WarmUp) -> tuple[str, list[Piece]]:
        question, pieces = rng.choice(self._questions), list[Piece]()
        visible = [question.subject]
        found: list[str] = []
        rounds = 2 if rng.random() < numbers.again_share else 1
        for number in range(rounds):
            relation, name = rng.choice(WORDS), rng.choice(visible)
            if rng.random() < numbers.informed_share:
                relation, name = self._wanted(question, number)
            passages = [one.contents for one in self._index.search(f"{relation} of {name}", TOP_K)]
            found = _names([self._facts[one] for one in passages])
            visible = [*dict.fromkeys([*visible, *found])]
            pieces.append(Piece(f"<search> {relation} of {name}</search>", is_trained=True))
            pieces.append(Piece(information(passages, max_chars=MAX_CHARS), is_trained=False))
        answer = rng.choice(found)
        if question.answer in found and rng.random() < numbers.informed_share:
            answer = question.answer
        pieces.append(Piece(f"<answer> {answer}</answer>", is_trained=True))
        return question.prompt, pieces

    def _wanted(self, question: Question, number: int) -> tuple[str, str]:
        name = question.subject
        steps = question.relations[::-1]
        for relation in steps[: min(number, len(steps) - 1)]:
            name = self._objects[name, relation]
        return steps[min(number, len(steps) - 1)], name


def _names(facts: Sequence[Fact]) -> list[str]:
    """Every name of ``facts`` once, in order."""
    return [*dict.fromkeys(name for fact in facts for name in (fact.subject, fact.object))]


MODEL_CONFIG: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "float32",
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": CONTEXT_LENGTH,
    "max_window_layers": 3,
    "use_sliding_window": False,
    "sliding_window": None,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "use_cache": True,
    "pad_token_id": PAD_ID,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
}


def model_files() -> dict[str, str]:
    """The checkpoint's configuration files by name: a Qwen3 of about 120,000 parameters, untied, in float32."""
    generation = {"do_sample": True, "temperature": 1.0, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    return {
        "config.json": json.dumps(MODEL_CONFIG, indent=2) + "\n",
        "generation_config.json": json.dumps(generation, indent=2) + "\n",
    }
