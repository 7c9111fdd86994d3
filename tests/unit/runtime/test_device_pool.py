"""One role at a time holds the devices, and colocated ones change their owner in one order only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from slime_core.errors import WeightSyncError
from slime_core.runtime.device_pool import CACHE, WEIGHTS, ColocatedDevices, DevicePool, Phase
from slime_core.weights.engine_control import Bucket, EngineControl, call
from slime_core.weights.hugging_face import WeightSpec
from slime_testing.fake_engine import FakeEngine


class FakeLearner:
    """A learner that knows what it holds on the devices, and what the engines hold when that changes."""

    def __init__(self, engine: FakeEngine) -> None:
        self.holds, self._engine = "everything", engine
        self.order: list[tuple[str, set[str]]] = []

    def offload(self, *, keeps_weights: bool = False) -> None:
        self._become("weights" if keeps_weights else "nothing")

    def onload(self) -> None:
        self._become("everything")

    def _become(self, holds: str) -> None:
        self.holds = holds
        self.order.append((holds, set(self._engine.released)))


class Sent:
    def wait(self) -> None: ...


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as engine:
        yield engine


@pytest.fixture
def control(engine: FakeEngine) -> Iterator[EngineControl]:
    control = EngineControl([engine.url], timeout_s=60)
    control.init_group(master_address="127.0.0.1", master_port=1, group="g", backend="gloo")
    yield control
    control.close()


def publish(control: EngineControl) -> None:
    bucket = Bucket((WeightSpec("norm", "float32", (4,)),))
    control.pause()
    control.begin_update()
    control.update_from_distributed(bucket, group="g", send=Sent, version="1")
    control.end_update()


def test_devices_have_one_owner() -> None:
    devices = DevicePool()
    refused = pytest.raises(AssertionError, match="held by 'learner'; 'critic'")
    with devices.held_by("learner"), refused, devices.held_by("critic"):
        pass


def test_shared_devices_go_through_five_phases(control: EngineControl, engine: FakeEngine) -> None:
    learner = FakeLearner(engine)
    colocated = ColocatedDevices(control, learner)
    for _ in range(2):
        with DevicePool(colocated).held_by("learner"):
            assert (colocated.phase, learner.holds) == (Phase.LEARNING, "everything")
            assert engine.released == {CACHE, WEIGHTS}
            colocated.make_room_for_weights()
            assert (colocated.phase, learner.holds, engine.released) == (Phase.PUBLISHING, "weights", {CACHE})
            publish(control)
        assert (colocated.phase, learner.holds, engine.released) == (Phase.GENERATING, "nothing", set())
    # Each entry: what the learner holds from then on, and which memory the engines have released at that moment.
    assert learner.order == 2 * [("everything", {CACHE, WEIGHTS}), ("weights", {CACHE, WEIGHTS}), ("nothing", {CACHE})]
    assert [path for path in engine.calls if "memory" in path] == 2 * [
        "/release_memory_occupation",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/resume_memory_occupation",
    ]


def test_a_request_that_is_still_running_is_ended_before_memory_goes(
    control: EngineControl, engine: FakeEngine
) -> None:
    engine.delay_s = 60
    body = {"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 4}}
    with ThreadPoolExecutor(1) as thread:
        straggler = thread.submit(call, engine.url, "/generate", body, timeout_s=60)
        while not engine.most_in_flight:
            time.sleep(0.01)
        ColocatedDevices(control, FakeLearner(engine)).vacate()
        assert straggler.result()["meta_info"]["finish_reason"]["type"] == "abort"
    assert engine.released == {CACHE, WEIGHTS}


def test_a_block_that_fails_moves_nothing(control: EngineControl, engine: FakeEngine) -> None:
    colocated = ColocatedDevices(control, FakeLearner(engine))
    with pytest.raises(RuntimeError, match="no gradient"), DevicePool(colocated).held_by("learner"):
        raise RuntimeError("no gradient")
    assert (colocated.phase, engine.released) == (Phase.LEARNING, {CACHE, WEIGHTS})


def test_devices_do_not_go_back_before_the_engines_have_room_for_weights(
    control: EngineControl, engine: FakeEngine
) -> None:
    colocated = ColocatedDevices(control, FakeLearner(engine))
    refused = pytest.raises(AssertionError, match=r"learning; .*publishing")
    with refused, DevicePool(colocated).held_by("learner"):
        pass


@pytest.mark.parametrize(
    "disordered",
    [
        lambda control: control.resume_memory(WEIGHTS),
        lambda control: (control.release_memory(CACHE), control.release_memory(CACHE)),
        lambda control: (control.release_memory(WEIGHTS), publish(control)),
    ],
    ids=["not released", "twice", "update without weights"],
)
def test_the_fake_engine_refuses_another_order(
    disordered: Callable[[EngineControl], object], control: EngineControl
) -> None:
    with pytest.raises(WeightSyncError, match="refused with status"):
        disordered(control)
