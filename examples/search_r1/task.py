"""An invented world of people, towns, rivers and hills: facts about them, questions, and the content of the files.

A fact is one passage, ``The river of Lodur is Gatod.``, with its subject as the title. A question is about one fact
(``What is the river of Lodur?``) or about two connected facts (``What is the teacher of the lord of Siman?``), where
the first answer is not in the question, so it must be searched for.

The split is by the subjects of questions: no training question names a subject of a held-out one. All facts are in the
corpus, so training questions teach to search and to read, not the facts.

A name is two tokens, such as ``Zo`` and ``rin``. Every token occurs in names of training questions; a held-out name is
a new pair.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from examples import tiny_model
from examples.tiny_model import SPECIAL_TOKENS

__all__ = [
    "CONTEXT_LENGTH",
    "HOPS",
    "RELATIONS",
    "VOCABULARY",
    "Fact",
    "Question",
    "World",
    "corpus_lines",
    "data_files",
    "invented",
    "tokenizer_files",
    "world",
]

SEED = 9516

CONSONANTS = "BDFGKLMNPRSTVZ"
ONSETS = tuple(consonant + vowel for consonant in CONSONANTS for vowel in "aeiou")[:60]
ENDINGS = tuple(
    consonant + vowel + last for consonant, last in zip("ldrnkmts", "nrslkndm", strict=True) for vowel in "aeiou"
)
"""Second halves of names, 40 of them; none is part of a word in facts or questions."""

COUNTS = {"person": 160, "town": 100, "river": 60, "hill": 40}
"""Kind -> number of entities."""

RELATIONS = {
    "person": {"home": "town", "teacher": "person"},
    "town": {"river": "river", "lord": "person"},
    "river": {"spring": "hill"},
    "hill": {},
}
"""Kind -> relation -> kind of the object."""

HOPS = tuple(
    (kind, first, second) for kind, own in RELATIONS.items() for first, of in own.items() for second in RELATIONS[of]
)
"""Forms of two-fact questions: the kind of the subject, its relation, and the relation of that relation's object."""

HELD_OUT_SHARE = 0.25
"""Fraction of the subjects of each kind."""

NUM_TRAIN, NUM_HELD_OUT = 800, 200
TWO_HOP_SHARE = 0.4
"""Fraction of the questions."""

TAGS = ("<search>", "</search>", "<information>", "</information>", "<answer>", "</answer>")
WORDS = ("What", " is", " the", " The", " of", *(f" {one}" for own in RELATIONS.values() for one in own), "?", ".")
FORM = ("\n", "\n\n", "Doc", " 1", " 2", " 3", " 4", " 5", "(Title:", ")")
VOCABULARY = (*SPECIAL_TOKENS, *TAGS, *FORM, *WORDS, *(f" {one}" for one in ONSETS), *ENDINGS)
"""The tokens in the order of their ids. Words include the space before them; a name is an onset and an ending."""
CONTEXT_LENGTH = 256


@dataclass(frozen=True, slots=True, order=True)
class Fact:
    """One fact, which is one passage.

    Example: ``Fact("Lodur", "river", "Gatod").text`` is ``"The river of Lodur is Gatod."``.
    """

    subject: str
    relation: str
    object: str

    @property
    def text(self) -> str:
        """The fact as a sentence."""
        return f"The {self.relation} of {self.subject} is {self.object}."

    @property
    def contents(self) -> str:
        """The passage in the format of the paper's corpora: the title in the first line, then the text."""
        return f"{self.subject}\n{self.text}"


@dataclass(frozen=True, slots=True, order=True)
class Question:
    """One question.

    Arguments:
        subject: the entity that it names.
        relations: one, or two in the order of the question: ``("river", "home")`` is the river of the home of the
            subject.
        answer: the name of an entity.
    """

    subject: str
    relations: tuple[str, ...]
    answer: str

    @property
    def prompt(self) -> str:
        """The question as text."""
        return f"What is the {' of the '.join(self.relations)} of {self.subject}?"

    def row(self) -> dict[str, object]:
        """Return the data row, in the format of the paper's repository."""
        return {
            "data_source": "invented_world",
            "prompt": [{"role": "user", "content": self.prompt}],
            "ability": "fact-reasoning",
            "reward_model": {"style": "rule", "ground_truth": {"target": [self.answer]}},
            "metadata": {"hops": len(self.relations), "subject": self.subject},
        }


@dataclass(frozen=True, slots=True)
class World:
    """The facts, the training questions and the held-out questions."""

    facts: tuple[Fact, ...]
    train: tuple[Question, ...]
    held_out: tuple[Question, ...]

    @property
    def entities(self) -> frozenset[str]:
        """All names."""
        return frozenset(name for fact in self.facts for name in (fact.subject, fact.object))


def _names(count: int, rng: random.Random, *, without: Iterable[str] = ()) -> list[str]:
    """Return ``count`` different names, none of them in ``without``."""
    taken, found = set(without), list[str]()
    while len(found) < count:
        name = rng.choice(ONSETS) + rng.choice(ENDINGS)
        if name not in taken:
            taken.add(name)
            found.append(name)
    return found


@cache
def world() -> World:
    """Return the world of the corpus and the questions, the same everywhere."""
    return invented(SEED)


def invented(seed: int, *, without: Iterable[str] = ()) -> World:
    """Return a random world; equal seeds give equal worlds.

    Arguments:
        without: names that it must not use.
    """
    rng = random.Random(seed)
    every = _names(sum(COUNTS.values()), rng, without=without)
    kinds: dict[str, list[str]] = {}
    for kind, count in COUNTS.items():
        kinds[kind], every = every[:count], every[count:]
    known: dict[tuple[str, str], str] = {}
    for kind, own in RELATIONS.items():
        for name in kinds[kind]:
            for relation, of in own.items():
                known[name, relation] = rng.choice([one for one in kinds[of] if one != name])
    held_out = {name for own in kinds.values() for name in rng.sample(own, round(HELD_OUT_SHARE * len(own)))}
    questions = [*_one_hop(known), *_two_hops(kinds, known)]
    rng.shuffle(questions)
    return World(
        facts=tuple(Fact(name, relation, found) for (name, relation), found in known.items()),
        train=_share([one for one in questions if one.subject not in held_out], NUM_TRAIN),
        held_out=_share([one for one in questions if one.subject in held_out], NUM_HELD_OUT),
    )


def _one_hop(known: Mapping[tuple[str, str], str]) -> list[Question]:
    return [Question(name, (relation,), found) for (name, relation), found in known.items()]


def _two_hops(kinds: Mapping[str, list[str]], known: Mapping[tuple[str, str], str]) -> list[Question]:
    return [
        Question(name, (second, first), known[known[name, first], second])
        for kind, first, second in HOPS
        for name in kinds[kind]
    ]


def _share(questions: list[Question], most: int) -> tuple[Question, ...]:
    """Return at most ``most`` of ``questions``, ``TWO_HOP_SHARE`` of them about two facts, in the given order."""
    by_hops = {hops: [one for one in questions if len(one.relations) == hops] for hops in (1, 2)}
    one = min(len(by_hops[1]), round(most * (1 - TWO_HOP_SHARE)))
    kept = {*by_hops[1][:one], *by_hops[2][: round(one * TWO_HOP_SHARE / (1 - TWO_HOP_SHARE))]}
    return tuple(question for question in questions if question in kept)


def corpus_lines() -> str:
    """Return the corpus: JSON lines with ``id`` and ``contents``, the format of the paper's retriever."""
    rows = ({"id": str(number), "contents": fact.contents} for number, fact in enumerate(world().facts))
    return "".join(json.dumps(row) + "\n" for row in rows)


def data_files() -> dict[str, str]:
    """Return name -> content of the data files."""
    found = world()
    return {
        "corpus.jsonl": corpus_lines(),
        "train.jsonl": _lines(found.train),
        "held_out.jsonl": _lines(found.held_out),
    }


def _lines(questions: Iterable[Question]) -> str:
    return "".join(json.dumps(question.row()) + "\n" for question in questions)


def tokenizer_files() -> dict[str, str]:
    """Return name -> content of the tokenizer's files: one token per word, two per name."""
    longest_first = sorted(VOCABULARY[len(SPECIAL_TOKENS) :], key=len, reverse=True)
    pattern = "|".join("".join(f"\\{char}" if char in "?.()|" else char for char in one) for one in longest_first)
    return tiny_model.tokenizer_files(VOCABULARY, pattern=pattern, context_length=CONTEXT_LENGTH)
