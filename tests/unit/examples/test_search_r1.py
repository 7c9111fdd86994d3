"""The invented world: its files, its split, what its tokenizer can say, and what the warm-up shows."""

from __future__ import annotations

from itertools import islice

import pytest
from tokenizers import Tokenizer

from examples.search_r1 import recipe, task
from examples.search_r1.recipe import Piece, WarmUp, warm_up_batches
from examples.search_r1.task import world
from slime_searchr1.index import CORPUS, Index, read_corpus
from slime_searchr1.protocol import information, is_well_formed

FOLDER = CORPUS.parents[1]
FACTS = {(fact.subject, fact.relation): fact.object for fact in world().facts}


def test_the_files_are_what_the_recipe_makes() -> None:
    files = {f"data/{name}": text for name, text in task.data_files().items()}
    files |= {f"model/{name}": text for name, text in {**task.tokenizer_files(), **recipe.model_files()}.items()}
    for name, text in files.items():
        assert (FOLDER / name).read_text() == text, name


def test_no_training_question_names_a_subject_of_a_held_out_one() -> None:
    subjects = {question.subject for question in world().held_out}
    assert not {question.subject for question in world().train} & subjects
    assert not [question for question in world().train if any(name in question.prompt for name in subjects)]


def test_the_facts_answer_every_question() -> None:
    for question in (*world().train, *world().held_out):
        name = question.subject
        for relation in reversed(question.relations):
            name = FACTS[name, relation]
        assert name == question.answer


def test_the_embedded_retriever_finds_every_fact_first() -> None:
    index = Index(read_corpus(CORPUS))
    for fact in world().facts:
        assert index.search(f"{fact.relation} of {fact.subject}", 1)[0].contents == fact.contents


def test_the_tokenizer_reads_and_writes_whatever_a_response_may_hold() -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "model" / "tokenizer.json"))
    unknown = task.VOCABULARY.index("<unk>")
    texts = [question.prompt for question in (*world().train, *world().held_out)]
    texts += [information([fact.contents] * 3, max_chars=1000) for fact in world().facts]
    texts += [f"<search> {fact.relation} of {fact.subject}</search>" for fact in world().facts]
    texts += [f"<answer> {name}</answer>" for name in world().entities]
    for text in texts:
        ids = tokenizer.encode(text).ids
        assert unknown not in ids
        assert tokenizer.decode(ids) == text


def test_the_warm_up_shows_the_form_and_no_name_of_the_world() -> None:
    numbers = WarmUp(steps=4, batch_size=64, worlds=2)
    taken = world().entities
    for batch in warm_up_batches(numbers):
        for question, pieces in batch:
            response = "".join(piece.text for piece in pieces)
            assert is_well_formed(response)
            assert not [name for name in taken if name in question + response]
            assert [piece.is_turn for piece in pieces] == [True, False] * (len(pieces) // 2) + [True]


def questions_over(hops: int) -> list[tuple[list[str], list[Piece]]]:
    """Return what questions of the warm-up mention, the subject last, and their responses."""
    rows = []
    for batch in islice(warm_up_batches(WarmUp(worlds=4, batch_size=512)), 2):
        for prompt, pieces in batch:
            names = prompt.removeprefix("What is the ").removesuffix("?").split(" of ")
            rows += [([name.removeprefix("the ") for name in names], pieces)] if len(names) == hops + 1 else []
    return rows


def test_answers_of_the_warm_up_do_not_depend_on_the_question() -> None:
    """An answer is one of about five names; an informed one would be right wherever the passages allow it."""
    rows = questions_over(1)
    right = 0
    for (relation, subject), (_, passages, answer) in rows:
        answers = answer.text.removeprefix("<answer> ").removesuffix("</answer>")
        right += f"The {relation} of {subject} is {answers}." in passages.text
    assert len(rows) > 400
    assert right / len(rows) < 0.3


def test_queries_of_the_warm_up_do_not_depend_on_the_order_of_the_relations() -> None:
    queries = [
        (outer, inner, pieces[at].text.split()[1])
        for (outer, inner, _), pieces in questions_over(2)
        for at in (0, 2)
        if outer != inner
    ]
    assert {answers in (outer, inner) for outer, inner, answers in queries} == {True}
    assert sum(answers == inner for _, inner, answers in queries) / len(queries) == pytest.approx(0.5, abs=0.06)
