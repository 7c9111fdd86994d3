"""Errors of constructors as text."""

from __future__ import annotations

import base64
import pickle
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray._private import worker
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError, OwnerDiedError

from slime_core.errors import ConfigError, EngineError, NodeDied, ProcessDied, RemoteError, SlimeError
from slime_core.runtime.actors import SealedError, last_words, local_error


class PluginsOwn(EngineError):
    """Known to one plugin only."""


def test_a_sealed_error_keeps_its_class_and_message() -> None:
    sealed = SealedError.seal(ConfigError("lr is 'minus' \"one\"\n\u00e9"))
    opened = SealedError.open(f"The actor died: '{sealed}' and so on")
    assert type(opened) is ConfigError
    assert str(opened) == "lr is 'minus' \"one\"\n\u00e9"


def test_an_error_of_a_plugin_becomes_its_nearest_known_ancestor() -> None:
    opened = SealedError.open(str(SealedError.seal(PluginsOwn("out of tape"))))
    assert type(opened) is EngineError
    assert str(opened) == "out of tape"


def test_text_without_a_seal_holds_no_error() -> None:
    assert SealedError.open("The actor died.") is None


def test_nothing_but_a_name_and_a_message_is_opened() -> None:
    def sealed(content: bytes) -> SlimeError | None:
        return SealedError.open(f"slime-error:{base64.b64encode(content).decode()}")

    assert sealed(pickle.dumps(ConfigError("pickled"))) is None
    assert sealed(b'["SystemExit", "7"]') is None
    assert sealed(b'{"ConfigError": 1}') is None
    assert SealedError.open("slime-error:abc") is None


DIED = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: LearnerActor\n\tpid: 4711\n\tip: 127.0.0.1"
)


def test_the_last_lines_of_a_process_that_died_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    log = logs / "worker-ab-01000000-4711.err"
    log.write_text(":job_id:01000000\n:actor_name:LearnerActor\n\n1\n2\nterminate called\n")
    (logs / "worker-cd-01000000-14711.err").write_text("of another process\n")
    monkeypatch.setattr(worker, "_global_node", SimpleNamespace(get_session_dir_path=lambda: str(tmp_path)))
    error = local_error(ActorDiedError(killed()), who="learner rank 1: train()")
    assert type(error) is ProcessDied
    first, where, *last = str(error).splitlines()
    assert first.startswith("learner rank 1: train() ")
    assert str(log) in where
    assert last == ["  1", "  2", "  terminate called"]


KILLED = (
    "The actor died unexpectedly before finishing this task.\nThe actor is dead because its worker process has died. "
    "Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2. End "
    "of file. There are some potential root causes."
)
"""What ray 2.60 says after the process of an actor was killed."""


def killed(message: str = KILLED) -> ActorDiedErrorContext:
    return ActorDiedErrorContext(actor_id=bytes(16), class_name="LearnerActor", pid=4711, error_message=message)


@pytest.mark.parametrize(
    ("printed", "message", "named"),
    [
        ("", KILLED, "SIGKILL"),
        ("FutureWarning: this goes away\n[rank1] compiled in 3 s\n", KILLED, "SIGKILL"),
        ("", f"{KILLED} Worker exits with an exit code 7.", "code 7"),
    ],
)
def test_a_process_that_was_killed_is_one_line_with_its_signal(
    printed: str, message: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker-ab-01000000-4711.err").write_text(printed)
    monkeypatch.setattr(worker, "_global_node", SimpleNamespace(get_session_dir_path=lambda: str(tmp_path)))
    error = local_error(ActorDiedError(killed(message)), who="learner rank 1: train()")
    assert type(error) is ProcessDied
    assert "\n" not in str(error)
    assert all(part in str(error) for part in ("learner rank 1: train() died.", "4711", named))


@pytest.mark.parametrize(
    ("printed", "named"),
    [("*** SIGSEGV received at time=1 on cpu 0 ***\nPC: @ 0x7f\n", "SIGSEGV"), ("*** SIGABRT received\n", "SIGABRT")],
)
def test_a_crash_is_named_with_what_the_process_printed(
    printed: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker-ab-01000000-4711.err").write_text(printed)
    monkeypatch.setattr(worker, "_global_node", SimpleNamespace(get_session_dir_path=lambda: str(tmp_path)))
    first, *lines = str(local_error(ActorDiedError(killed()), who="learner rank 1: train()")).splitlines()
    assert named in first
    assert len(lines) == 1 + printed.count("\n")


def test_a_constructor_that_raised_an_error_is_no_death() -> None:
    said = "The actor died because of an error raised in its creation task, ray::Rank.__init__()\nTypeError"
    cause = ActorDiedErrorContext(actor_id=bytes(16), class_name="LearnerActor", pid=4711, error_message=said)
    assert type(local_error(ActorDiedError(cause), who="learner rank 1: setup()")) is RemoteError


def test_results_that_died_with_their_owner_are_a_death() -> None:
    error = local_error(OwnerDiedError("ab" * 20, None, ""), who="learner rank 1: train()")
    assert type(error) is ProcessDied
    assert str(error).startswith("learner rank 1: train() is lost (OwnerDiedError).")


NODE_GONE = [
    "The actor is dead because its owner has died. Owner worker exit type: SYSTEM_ERROR Worker exit detail: Owner's "
    "node has crashed.",
    "The actor died because its node has died. Node Id: a03c\n\tthe actor's node was terminated unexpectedly: health "
    "check failed due to missing too many heartbeats",
]
"""What ray 2.60 says after the raylet of the driver's node, or of another one, was killed."""


@pytest.mark.parametrize("message", NODE_GONE)
def test_a_dead_raylet_is_called_the_death_of_ray(
    message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_global_node", SimpleNamespace(get_session_dir_path=lambda: str(tmp_path)))
    cause = ActorDiedErrorContext(actor_id=bytes(16), class_name="EngineActor", pid=4711, error_message=message)
    error = local_error(ActorDiedError(cause), who="engine 0: watch()")
    assert type(error) is NodeDied
    assert re.search(rf"^Ray .* engine 0: watch\(\) (?s:.*){tmp_path}", str(error))


@pytest.mark.parametrize("printed", ["", ":job_id:01000000\n:actor_name:SamplerActor\n"])
def test_a_process_that_printed_nothing_has_no_last_lines(tmp_path: Path, printed: str) -> None:
    (tmp_path / "worker-ab-01000000-4711.err").write_text(printed)
    assert last_words(DIED, tmp_path) == []
    assert last_words("The actor died.", tmp_path) == last_words(DIED, None) == []


def test_of_long_output_only_the_end_is_reported(tmp_path: Path) -> None:
    (tmp_path / "worker-ab-01000000-4711.err").write_text("".join(f"{number}\n" for number in range(100)))
    assert last_words(DIED, tmp_path)[1:] == [f"  {number}" for number in range(85, 100)]
