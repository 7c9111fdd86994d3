"""The warm-up that made the checkpoint in ``model/``, as data and numbers for any trainer of next-token models.

The warm-up teaches the form: one search for each relation of the question; a query is one of these relations and a name
that is in the text so far; the answer is a name of the last passages. Relation and name are random. Its worlds are
others, created by the same recipe with names that the world of the questions does not use, so its passages differ, too.

A question about one fact has one relation and one name, so its query follows from the form, and its answer is one of
about five names. Reinforcement learning teaches the rest: to answer with the object of the right passage; of two
relations, to search for the inner one first; and to search for the outer one with the name that was found.

To repeat it: create a model from :func:`model_files`, with weights initialised with ``WarmUp.seed``; for each batch of
:func:`warm_up_batches` do one step of AdamW on the mean cross-entropy over the turns of the model plus
``WarmUp.passages_weight`` times that over the passages, prompt through the chat template; learning rate
:meth:`WarmUp.learning_rate`. Passages name their subject twice, which teaches a new model to copy names.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from examples import tiny_model
from examples.search_r1.task import CONTEXT_LENGTH, VOCABULARY, Fact, World, invented, world
from slime_searchr1.index import Index
from slime_searchr1.protocol import information

__all__ = ["Piece", "WarmUp", "model_files", "warm_up_batches"]

TOP_K = 3
MAX_CHARS = 4000


@dataclass(frozen=True, slots=True)
class WarmUp(tiny_model.WarmUp):
    """The numbers of the warm-up; rows are trajectories.

    Arguments:
        worlds: number of other worlds, from which questions and passages are taken.
        passages_weight: weight of the cross-entropy over passages; that over the turns of the model has 1.
    """

    batch_size: int = 64
    lr_warmup_steps: int = 100
    worlds: int = 20
    passages_weight: float = 0.5


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a response: a turn of the model, or the result of a search.

    Arguments:
        text: the text in the response.
        is_turn: True: the model wrote it.
    """

    text: str
    is_turn: bool


def warm_up_batches(warm_up: WarmUp | None = None) -> Iterator[list[tuple[str, list[Piece]]]]:
    """Yield ``steps`` batches of (question, response); the same ``warm_up`` always yields the same ones."""
    numbers = warm_up or WarmUp()
    rng = random.Random(numbers.seed)
    taken = world().entities
    others = [_Other(invented(number, without=taken)) for number in range(numbers.worlds)]
    for _ in range(numbers.steps):
        yield [rng.choice(others).trajectory(rng) for _ in range(numbers.batch_size)]


class _Other:
    """One of the other worlds, with its own retriever."""

    def __init__(self, found: World) -> None:
        self._index = Index([fact.contents for fact in found.facts])
        self._questions = [*found.train, *found.held_out]
        self._facts = {fact.contents: fact for fact in found.facts}

    def trajectory(self, rng: random.Random) -> tuple[str, list[Piece]]:
        question, pieces = rng.choice(self._questions), list[Piece]()
        visible = [question.subject]
        found: list[str] = []
        for _ in question.relations:
            query = f"{rng.choice(question.relations)} of {rng.choice(visible)}"
            passages = [one.contents for one in self._index.search(query, TOP_K)]
            found = _names([self._facts[one] for one in passages])
            visible = [*dict.fromkeys([*visible, *found])]
            pieces.append(Piece(f"<search> {query}</search>", is_turn=True))
            pieces.append(Piece(information(passages, max_chars=MAX_CHARS), is_turn=False))
        pieces.append(Piece(f"<answer> {rng.choice(found)}</answer>", is_turn=True))
        return question.prompt, pieces


def _names(facts: Sequence[Fact]) -> list[str]:
    """Return every name of ``facts`` once, in order."""
    return [*dict.fromkeys(name for fact in facts for name in (fact.subject, fact.object))]


def model_files() -> dict[str, str]:
    """Return name -> content of the checkpoint's configuration files: about 91,000 parameters."""
    return tiny_model.model_files(
        vocab_size=len(VOCABULARY), num_layers=2, context_length=CONTEXT_LENGTH, rope_theta=1000.0
    )
