"""``slime searchr1 serve``: the built-in retriever over HTTP, as requests and as a run see it."""

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
    document = {"contents": "Bela\nNothing."}
    async with serving(INDEX, topk=1) as url:
        assert await post(url, {"queries": ["bela"]}) == (200, {"result": [[document]]})
        status, answer = await post(url, {"queries": ["bela", "nonesuch"], "topk": 1, "return_scores": True})
    ((first,), second) = answer["result"]
    assert (status, first["document"], second) == (200, document, [])
    assert first["score"] > 0


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "queries"),
        ({"queries": "river"}, "queries"),
        ({"queries": [1]}, "queries.0"),
        ({"queries": ["a"], "topk": 0}, "topk"),
        ([], ""),
    ],
)
async def test_a_request_of_another_form_is_refused(body: object, field: str) -> None:
    async with serving(INDEX) as url:
        status, answer = await post(url, body)
    assert status == 400
    assert str(answer["detail"]).startswith(field)


async def test_a_run_finds_the_same_over_http_as_in_its_process() -> None:
    embedded = make_retriever(SearchOptions(topk=5))
    assert isinstance(embedded, EmbeddedRetriever)
    async with serving(Index(read_corpus(CORPUS))) as url:
        remote = make_retriever(SearchOptions(topk=5, search_url=url))
        for query in ("river of the home", "Zo", ""):
            over_http, in_process = await remote.search(query), await embedded.search(query)
            assert [passage.contents for passage in over_http] == [passage.contents for passage in in_process]


async def test_a_port_in_use_is_named() -> None:
    async with serving(INDEX) as url:
        port = int(url.rpartition(":")[2].partition("/")[0])
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            async with serving(INDEX, port=port):
                pass


def test_a_corpus_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl"):
        main(["serve", "--corpus", str(tmp_path / "none.jsonl")])
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"contents": "a"}\n{"text": "b"}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl, line 2"):
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
