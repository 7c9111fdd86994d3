"""The invented world: its files, its split, what its tokenizer can say, and what the warm-up shows."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer

import slime_searchr1.world
from slime_searchr1.index import CORPUS, Index, read_corpus
from slime_searchr1.protocol import information, is_well_formed
from slime_searchr1.world import recipe, task
from slime_searchr1.world.recipe import WarmUp, warm_up_batches
from slime_searchr1.world.task import Fact, Question, world

FOLDER = Path(slime_searchr1.world.__file__).parent
KNOWN = {(fact.subject, fact.relation): fact.object for fact in world().facts}


def test_the_files_are_what_the_recipe_makes() -> None:
    files = {f"data/{name}": text for name, text in task.data_files().items()}
    files |= {f"model/{name}": text for name, text in {**task.tokenizer_files(), **recipe.model_files()}.items()}
    for name, text in files.items():
        assert (FOLDER / name).read_text() == text, name


def test_no_training_question_names_a_subject_of_a_held_out_one() -> None:
    found = world()
    assert not {one.subject for one in found.train} & {one.subject for one in found.held_out}
    subjects = {one.subject for one in found.held_out}
    assert not [one for one in found.train if any(name in one.prompt for name in subjects)]


def test_there_are_hundreds_of_entities_and_questions_over_one_and_two_facts() -> None:
    found = world()
    assert len(found.entities) == 349
    assert len({fact.contents for fact in found.facts}) == 580
    sizes = [[len(one.relations) for one in part] for part in (found.train, found.held_out)]
    assert [(one.count(1), one.count(2)) for one in sizes] == [(435, 290), (120, 80)]


def test_the_facts_answer_every_question() -> None:
    for question in (*world().train, *world().held_out):
        name = question.subject
        for relation in reversed(question.relations):
            name = KNOWN[name, relation]
        assert name == question.answer


def test_a_fact_and_a_question_are_written_like_this() -> None:
    assert Fact("Zorin", "river", "Malka").contents == "Zorin\nThe river of Zorin is Malka."
    assert Question("Mirel", ("river", "home"), "Malka").prompt == "What is the river of the home of Mirel?"


def test_the_embedded_retriever_finds_every_fact_first() -> None:
    index = Index(read_corpus(CORPUS))
    for fact in world().facts:
        assert index.search(f"{fact.relation} of {fact.subject}", 1)[0].contents == fact.contents


def test_the_tokenizer_reads_and_writes_whatever_a_response_may_hold() -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "model" / "tokenizer.json"))
    unknown = task.VOCABULARY.index("<unk>")
    texts = [one.prompt for one in (*world().train, *world().held_out)]
    texts += [information([fact.contents] * 3, max_chars=1000) for fact in world().facts]
    texts += [f"<search> {fact.relation} of {fact.subject}</search>" for fact in world().facts]
    texts += [f"<answer> {name}</answer>" for name in world().entities]
    for text in texts:
        ids = tokenizer.encode(text).ids
        assert unknown not in ids
        assert tokenizer.decode(ids) == text


def test_the_longest_response_fits_the_context() -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "model" / "tokenizer.json"))
    name = world().facts[0].subject
    turn = f"<search> river of {name}</search>" + information([world().facts[0].contents] * 3, max_chars=1000)
    text = f"<|user|>What is the river of the home of {name}?<|assistant|>{turn * 2}<answer> {name}</answer>"
    assert len(tokenizer.encode(text).ids) <= task.CONTEXT_LENGTH


def test_the_warm_up_shows_the_form_and_no_name_of_the_world() -> None:
    numbers = WarmUp(steps=4, batch_size=64, worlds=2)
    taken = world().entities
    for batch in warm_up_batches(numbers):
        for question, pieces in batch:
            response = "".join(piece.text for piece in pieces)
            assert is_well_formed(response)
            assert not [name for name in taken if name in question + response]
            assert [piece.is_trained for piece in pieces] == [True, False] * (len(pieces) // 2) + [True]


def test_the_warm_up_is_the_same_every_time() -> None:
    numbers = WarmUp(steps=2, batch_size=8, worlds=2)
    assert list(warm_up_batches(numbers)) == list(warm_up_batches(numbers))
    assert list(warm_up_batches(replace(numbers, seed=1))) != list(warm_up_batches(numbers))


def test_answers_of_the_warm_up_do_not_depend_on_the_question() -> None:
    """An answer is one of about five names; an informed one would be right wherever the passages allow it."""
    batches = islice(warm_up_batches(WarmUp(worlds=4, batch_size=512, again_share=0.0)), 2)
    right = total = 0
    for question, pieces in (row for batch in batches for row in batch):
        if question.count(" of ") == 1:
            _, _, name = question.removesuffix("?").partition(" of ")
            relation = question.partition("What is the ")[2].partition(" of ")[0]
            said = pieces[-1].text.removeprefix("<answer> ").removesuffix("</answer>")
            right += f"The {relation} of {name} is {said}." in pieces[1].text
            total += 1
    assert total > 400
    assert right / total < 0.3


def test_rows_have_the_form_of_the_papers_repository() -> None:
    row = json.loads((FOLDER / "data" / "held_out.jsonl").read_text().splitlines()[0])
    assert row["prompt"] == [{"role": "user", "content": world().held_out[0].prompt}]
    assert row["reward_model"]["ground_truth"] == {"target": [world().held_out[0].answer]}
