"""Errors of actors as text: of their constructors, and of processes that died."""

from __future__ import annotations

import base64
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray._private import worker
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError

from slime_core.errors import ConfigError, EngineError, NodeDied, ProcessDied, RemoteError, SlimeError
from slime_core.runtime.actors import SealedError, local_error

RANK = "learner rank 1: train()"


class PluginsOwn(EngineError):
    """Known to one plugin only."""


@pytest.mark.parametrize(
    ("error", "kind"), [(ConfigError("lr is 'minus' \"one\"\n\u00e9"), ConfigError), (PluginsOwn("tape"), EngineError)]
)
def test_a_sealed_error_keeps_its_message_and_its_nearest_known_class(error: SlimeError, kind: type) -> None:
    opened = SealedError.open(f"The actor died: '{SealedError.seal(error)}' and so on")
    assert (type(opened), str(opened)) == (kind, str(error))


def test_nothing_but_a_name_and_a_message_is_opened() -> None:
    for content in (pickle.dumps(ConfigError("pickled")), b'["SystemExit", "7"]', b'{"ConfigError": 1}'):
        assert SealedError.open(f"slime-error:{base64.b64encode(content).decode()}") is None
    assert SealedError.open("slime-error:abc") is SealedError.open("The actor died.") is None


KILLED = (
    "The actor died unexpectedly before finishing this task.\nThe actor is dead because its worker process has died. "
    "Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2. End "
    "of file. There are some potential root causes."
)
"""What ray 2.60 says after the process of an actor was killed."""

Died = Callable[..., SlimeError]


@pytest.fixture
def died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Died:
    """Makes the error of an actor that printed a text before Ray said a message."""
    monkeypatch.setattr(worker, "_global_node", SimpleNamespace(get_session_dir_path=lambda: str(tmp_path)))
    (tmp_path / "logs").mkdir()

    def make(printed: str = "", message: str = KILLED) -> SlimeError:
        (tmp_path / "logs" / "worker-ab-01000000-4711.err").write_text(printed)
        cause = ActorDiedErrorContext(actor_id=bytes(16), class_name="Rank", pid=4711, error_message=message)
        return local_error(ActorDiedError(cause), who=RANK)

    return make


def test_the_last_lines_of_a_process_that_died_are_reported(died: Died, tmp_path: Path) -> None:
    (tmp_path / "logs" / "worker-cd-01000000-14711.err").write_text("of another process\n")
    printed = "".join(f"{number}\n" for number in range(100))
    error = died(f":job_id:01000000\n:actor_name:LearnerActor\n\n{printed}terminate called\n")
    assert type(error) is ProcessDied
    first, where, *last = str(error).splitlines()
    assert first.startswith(f"{RANK} ")
    assert str(tmp_path / "logs" / "worker-ab-01000000-4711.err") in where
    assert last == [*(f"  {number}" for number in range(86, 100)), "  terminate called"]


@pytest.mark.parametrize(
    ("printed", "message", "named"),
    [
        ("", KILLED, "SIGKILL"),
        (":job_id:01000000\n:actor_name:LearnerActor\n", KILLED, "SIGKILL"),
        ("FutureWarning: this goes away\n[rank1] compiled in 3 s\n", KILLED, "SIGKILL"),
        ("", f"{KILLED} Worker exits with an exit code 7.", "code 7"),
    ],
)
def test_a_process_that_was_killed_is_one_line_with_its_signal(
    died: Died, printed: str, message: str, named: str
) -> None:
    error = died(printed, message)
    assert type(error) is ProcessDied
    assert "\n" not in str(error)
    assert all(part in str(error) for part in (f"{RANK} died.", "4711", named))


@pytest.mark.parametrize(
    ("printed", "named"),
    [("*** SIGSEGV received at time=1 on cpu 0 ***\nPC: @ 0x7f\n", "SIGSEGV"), ("*** SIGABRT received\n", "SIGABRT")],
)
def test_a_crash_is_named_with_what_the_process_printed(died: Died, printed: str, named: str) -> None:
    first, *lines = str(died(printed)).splitlines()
    assert named in first
    assert len(lines) == 1 + printed.count("\n")


def test_a_constructor_that_raised_an_error_is_no_death(died: Died) -> None:
    text = "The actor died because of an error raised in its creation task, ray::Rank.__init__()\nTypeError"
    assert type(died("", text)) is RemoteError


@pytest.mark.parametrize(
    "message",
    [
        "The actor is dead because its owner has died. Owner worker exit type: SYSTEM_ERROR Worker exit detail: "
        "Owner's node has crashed.",
        "The actor died because its node has died. Node Id: a03c\n\tthe actor's node was terminated unexpectedly: "
        "health check failed due to missing too many heartbeats",
    ],
    ids=["the driver's", "another"],
)
def test_a_dead_raylet_is_called_the_death_of_ray(died: Died, message: str, tmp_path: Path) -> None:
    error = died("", message)
    assert type(error) is NodeDied
    assert re.search(rf"^Ray .* learner rank 1(?s:.*){tmp_path}", str(error))
