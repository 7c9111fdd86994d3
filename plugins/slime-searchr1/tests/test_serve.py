"""``slime searchr1 serve``: the built-in retriever over HTTP, as requests and as the run's own client see it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from slime_core.errors import ConfigError, DataError
from slime_searchr1.index import CORPUS, Index, read_corpus
from slime_searchr1.options import SearchOptions
from slime_searchr1.retrieval import EmbeddedRetriever, make_retriever
from slime_searchr1.serve import main, serving

INDEX = Index(["Zorin\nThe river of Zorin is Malka.", "Mirel\nThe home of Mirel is Zorin.", "Bela\nNothing."])


async def post(url: str, body: object) -> tuple[int, dict[str, object]]:
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        return response.status, await response.json()


async def test_each_query_gets_its_passages() -> None:
    async with serving(INDEX) as url:
        status, answer = await post(url, {"queries": ["river Zorin", "nonesuch"], "topk": 1, "return_scores": True})
    assert status == 200
    ((first,), second) = answer["result"]
    assert first["document"] == {"contents": "Zorin\nThe river of Zorin is Malka."}
    assert first["score"] > 0
    assert second == []


async def test_without_scores_the_documents_stand_alone() -> None:
    async with serving(INDEX, topk=1) as url:
        assert await post(url, {"queries": ["bela"]}) == (200, {"result": [[{"contents": "Bela\nNothing."}]]})


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ({}, "queries: "),
        ({"queries": "river"}, "queries: "),
        ({"queries": [1]}, "queries.0"),
        ({"queries": ["a"], "topk": 0}, "topk: "),
        ([], "Input should be"),
    ],
)
async def test_a_request_of_another_form_is_refused(body, wrong) -> None:
    async with serving(INDEX) as url:
        status, answer = await post(url, body)
    assert status == 400
    assert wrong in str(answer["detail"])


async def test_a_run_finds_the_same_over_http_as_in_its_own_process() -> None:
    embedded = make_retriever(SearchOptions(topk=5))
    assert isinstance(embedded, EmbeddedRetriever)
    async with serving(Index(read_corpus(CORPUS))) as url:
        remote = make_retriever(SearchOptions(topk=5, search_url=url))
        for query in ("river of the home", "Zo", ""):
            found, same = await remote.search(query), await embedded.search(query)
            assert [one.contents for one in found] == [one.contents for one in same]


async def test_a_port_in_use_is_named() -> None:
    async with serving(INDEX) as url:
        port = int(url.rpartition(":")[2].partition("/")[0])
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be listened on"):
            async with serving(INDEX, port=port):
                pass


def test_a_corpus_that_cannot_be_read_is_named(tmp_path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        main(["serve", "--corpus", str(tmp_path / "none.jsonl")])
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"contents": "a"}\n{"text": "b"}\n')
    with pytest.raises(DataError, match=r'bad.jsonl, line 2: no text "contents"'):
        main(["serve", "--corpus", str(bad)])


def test_the_command_says_how_a_run_reaches_it_and_ends_on_a_signal() -> None:
    command = [str(Path(sys.executable).with_name("slime")), "searchr1", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline(), process.stdout.readline()]
        process.terminate()
        process.wait(30)
    assert lines[0].startswith("580 passages of ")
    assert lines[1].startswith("--search-url http://127.0.0.1:")
