"""One publication from pause to resume: plan once, send in buckets, and compare every engine's checksums.

The learner's ranks call :class:`Publisher`. ``checksums.py`` explains the comparison.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import torch

from slime_core.config.model_config import described
from slime_core.errors import NonFiniteError, WeightSyncError
from slime_core.weights import PublisherSettings, bucket_bytes
from slime_core.weights.checksums import (
    SentWeights,
    listed,
    require_agreement,
    require_all_overwritten,
    require_restored,
)
from slime_core.weights.engine_control import SHA_DIGITS, XXH3_DIGITS, Bucket, EngineControl
from slime_core.weights.hugging_face import WeightSpec, expected_specs, spec_of
from slime_core.weights.transports import (
    Background,
    DiskTransport,
    DistributedTransport,
    TensorTransport,
    Transport,
    UpdateGroup,
    held_by_first_rank,
)

TIED = "lm_head.weight"
"""The output weight that a model with tied embeddings may leave out, or repeat."""

ATTENTION = re.compile(r".*\.(?:self_attn|attention|attn|linear_attn)\.")
"""The attention module in the name of one of its weights."""

CPU_BUCKET_BYTES = 30 * 1024**2
"""Largest bucket where learner and engines have no GPUs. The C library reuses blocks of up to 32 MiB (glibc,
``DEFAULT_MMAP_THRESHOLD_MAX``). A larger one consists of new pages each time, and the kernel takes longer to clear them
than the engine to receive them. Small buckets also let the learner prepare one while an engine loads another."""


def require_matching_specs(
    specs: Sequence[WeightSpec], expected: Mapping[str, WeightSpec], *, tied: bool = False, dtype: str | None = None
) -> None:
    """Check that ``specs`` can be sent to engines that expect ``expected``.

    Arguments:
        specs: of the weights to send.
        expected: specs of the checkpoint that the engines were started from.
        tied: the model uses its embedding as output weight, so the output weight may be absent on either side.
        dtype: the dtype in which the engines compute, if it is not that of their checkpoint; both are accepted, because
            an engine casts.

    Raises:
        WeightSyncError: weights are missing, unknown, duplicate, or of another shape or dtype; lists them.
    """
    sent = {spec.name: spec for spec in specs}
    ignored = {TIED} if tied else set()
    both = [(sent[name], expected[name]) for name in sent if name in expected]
    mistakes = {
        "missing": sorted(set(expected) - set(sent) - ignored),
        "unknown to the engines": sorted(set(sent) - set(expected) - ignored),
        "sent twice": sorted({spec.name for spec in specs if specs.count(spec) > 1}) if len(sent) < len(specs) else [],
        "wrong shape": [f"{a.name}: {a} instead of {b}" for a, b in both if a.shape != b.shape],
        "wrong dtype": [f"{a.name}: {a} instead of {b}" for a, b in both if a.dtype not in (b.dtype, dtype)],
    }
    if any(mistakes.values()):
        raise WeightSyncError(
            f"The learner exports {len(specs)} weights, the engines expect {len(expected)}; they differ, "
            "so nothing was sent. "
            + "; ".join(f"{kind}: {listed(names)}" for kind, names in mistakes.items() if names)
            + ". The learner has to export the names and shapes of the checkpoint that the engines were started from."
        )


def plan_buckets(specs: Sequence[WeightSpec], *, bytes_limit: int) -> list[Bucket]:
    """Assign every weight to a bucket. Buckets are in the order in which they fill up if weights arrive as in
    ``specs``.

    The weights of one attention module share a bucket. SGLang's loaders of latent attention keep a piece of a fused
    parameter until its sibling arrives in the same ``load_weights`` call, and drop it silently otherwise.

    Arguments:
        specs: all weights in the order of the export.
        bytes_limit: largest bucket in bytes; a larger weight or attention module gets a separate bucket.
    """
    inseparable: dict[tuple[str, str], list[WeightSpec]] = {}
    for spec in specs:
        attention = ATTENTION.match(spec.name)
        inseparable.setdefault((spec.dtype, attention[0] if attention else spec.name), []).append(spec)
    done: list[Bucket] = []
    opened: dict[str, list[WeightSpec]] = {}
    for (dtype, _), module in inseparable.items():
        current = opened.setdefault(dtype, [])
        if current and sum(spec.nbytes for spec in (*current, *module)) > bytes_limit:
            done.append(Bucket(tuple(current)))
            current.clear()
        current += module
    return done + [Bucket(tuple(specs)) for specs in opened.values() if specs]


ABANDON_S = 10.0
"""Seconds for engines to end an update that failed: one of them may answer nothing."""

NamedWeights = Iterable[tuple[str, torch.Tensor]]
Sent = dict[tuple[int, int], SentWeights]
"""Processes of an engine and digits of its digests -> checksums of engines of that kind."""


class Publisher:
    """Sends the learner's weights to the engines. The first rank sends; the other ranks take part in gathering. With
    ``holders`` each rank shares its copy with engine processes.

    Arguments:
        engine_urls: all engines.
        settings: see :class:`PublisherSettings`.
        weights: one pass over the learner's weights, for the plan; iterated by every rank.
        sends: whether this rank sends.
        on_written: for ``disk``: called on every rank with each version's folder, before any engine reads it;
            with None on ranks that do not send.

    Raises:
        WeightSyncError: the engines expect other weights, found before anything was sent; or the transport cannot reach
            an engine.
    """

    def __init__(
        self,
        engine_urls: Sequence[str],
        *,
        settings: PublisherSettings,
        weights: NamedWeights,
        sends: bool,
        on_written: Callable[[Path | None], None] | None = None,
    ) -> None:
        self._settings = settings
        self._on_written = on_written
        self._config = described(settings.model) or {}
        specs = [spec_of(name, weight) for name, weight in weights]
        limit = bucket_bytes(settings.bytes_limit, sum(math.prod(spec.shape) for spec in specs))
        limit = min(limit, CPU_BUCKET_BYTES) if settings.backend == "gloo" else limit
        self._buckets = plan_buckets(specs, bytes_limit=limit)
        self._digits = {SHA_DIGITS, XXH3_DIGITS}  # of the engines' digests; before their first answer, either
        self._control: EngineControl | None = None
        self._transport: Transport | None = None
        if sends:
            require_matching_specs(
                specs,
                expected_specs(settings.model),
                tied=bool(self._config.get("tie_word_embeddings")),
                dtype=settings.dtype,
            )
            self._control = EngineControl(
                engine_urls, timeout_s=settings.timeout_s, ranks_per_engine=settings.devices_per_engine
            )
            self._transport = _transport(settings, self._control, on_written)
        elif settings.transport == "tensor" and not held_by_first_rank(settings.holders):
            holders, gpus = settings.holders, settings.engine_gpus
            self._transport = TensorTransport(engine_urls, control=None, holders=holders, gpus=gpus)

    def publish(self, weights: NamedWeights, *, version: str) -> float:
        """Pause the engines, send ``weights`` as ``version``, and check that every engine holds them. Resume the
        engines if ``resumes`` is set. ``pause_mode`` decides about requests in flight.

        Returns:
            The share of the engines' weights whose checksums were compared with the sent weights: 1 for the models
            that the plugins support. Ranks that only gather compare nothing and return 1 too.

        Raises:
            NonFiniteError: a weight is NaN or infinite; no engine got a complete update.
            WeightSyncError: an engine refused, or does not hold the weights. Engines stay paused, and this publisher is
                closed: a new publisher must publish, or the run must end.
        """
        if self._transport is None:
            if self._control is not None:
                raise WeightSyncError(
                    "This publisher is closed, or its last publication has failed; connect another one"
                )
            for _ in weights:  # gathering is collective
                continue
            if self._on_written is not None:
                self._on_written(None)
            return 1.0
        remaining = iter(weights)
        try:
            self._start(self._transport, version)
            with _on_one_thread() if self._settings.backend == "gloo" else nullcontext():
                sent = self._send(self._transport, remaining)
            self._transport.commit()
        except WeightSyncError:
            for _ in remaining:  # the other ranks gather to the end
                continue
            if self._control is not None:
                with suppress(WeightSyncError):  # engines that are still alive end the update
                    self._control.end_update(limit_s=ABANDON_S)
            self.close()
            raise
        if self._control is None:
            return 1.0
        proven = self._prove(self._control, sent, version)
        if self._settings.resumes:
            self._control.resume()
        return proven

    def check_equal(self, weights: NamedWeights, *, version: str) -> None:
        """Overwrite all weights of the engines, publish ``weights``, and require the same checksums as before.

        Call it while the engines are idle and hold ``weights`` already: at the start, when engines and learner hold the
        same checkpoint, or after :meth:`publish`. Every process of every engine is compared, bit for bit.

        Raises:
            NonFiniteError: as in :meth:`publish`.
            WeightSyncError: as in :meth:`publish`, or weights were not restored; names them.
        """
        if self._control is None:
            self.publish(weights, version=version)
            return
        before = self._control.checksum()
        self._control.overwrite()
        require_all_overwritten(before, self._control.checksum())
        self.publish(weights, version=version)
        require_restored(before, self._control.checksum())

    def close(self) -> None:
        """Close the transport and the connections to the engines; a second call changes nothing."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()
        if self._control is not None:
            self._control.close()

    def _start(self, transport: Transport, version: str) -> None:
        """Pause the engines and start the transport; raise on every rank if the engines refuse."""
        refusal = None
        try:
            if self._control is not None:
                self._control.pause(self._settings.pause_mode)
                transport.start(version)
        except WeightSyncError as error:
            refusal = error
        transport.raise_together(refusal)

    def _send(self, transport: Transport, weights: NamedWeights) -> Sent:
        """Send all buckets; return the checksums that the engines must report."""
        sent = self._new_digests()
        digests = Background("digests")  # hashing releases the GIL, so it costs no time while a core is free
        try:
            for number, (bucket, tensors) in enumerate(_filled(self._buckets, weights), start=1):
                _require_finite(bucket.names, tensors)
                hashes = partial(_add, tuple(sent.values()), bucket, tensors)
                if not tensors[0].is_cuda:
                    digests.start(hashes)
                transport.send(bucket, tensors, last=number == len(self._buckets))
                if tensors[0].is_cuda:  # it starts kernels, and waits for none
                    hashes()
                del tensors, hashes  # the next bucket gets their memory
            digests.finish()
        finally:
            digests.close()
            transport.drain()
        return sent

    def _new_digests(self) -> Sent:
        """Return empty checksums for each kind of engine; none if checksums cannot be computed here."""
        settings = self._settings
        if self._control is None or settings.rearranges:
            return {}
        on_gpu = settings.backend == "nccl"
        describe = partial(
            SentWeights,
            dtype=settings.dtype,
            kv_heads=int(self._config.get("num_key_value_heads") or 0),
            config=self._config,
            on_gpu=on_gpu,
            stacks=not (on_gpu and _may_rearrange_experts()),
        )
        return {
            (ranks, digits): describe(ranks=ranks, digits=digits)
            for ranks in set(self._control.ranks)
            for digits in ({SHA_DIGITS} if on_gpu else self._digits)
        }

    def _prove(self, control: EngineControl, sent: Sent, version: str) -> float:
        served = control.version()
        if served != version:
            raise WeightSyncError(f"Weights of version {version} were sent; the engines report version {served}")
        checksums = control.checksum()
        require_agreement(checksums)
        if self._settings.rearranges:
            return 0.0
        self._digits = {engine.digits for engine in checksums}
        pairs = zip(checksums, control.ranks, strict=True)
        return min(sent[ranks, engine.digits].verify(engine) / sum(map(len, engine.ranks)) for engine, ranks in pairs)


def _transport(
    settings: PublisherSettings, control: EngineControl, on_written: Callable[[Path], None] | None
) -> Transport:
    if settings.transport == "tensor":
        holders = settings.holders or [(0,) * ranks for ranks in control.ranks]
        return TensorTransport(control.urls, control=control, holders=holders, gpus=settings.engine_gpus)
    if settings.transport == "disk":
        if settings.disk_folder is None:
            raise WeightSyncError("The disk transport of weights has no folder; give --update-weight-disk-dir.")
        return DiskTransport(control, folder=settings.disk_folder, template=settings.model, on_written=on_written)
    group = UpdateGroup(control, backend=settings.backend, address=settings.address, timeout_s=settings.timeout_s)
    return DistributedTransport(control, group)


BLACKWELL = 10
"""Compute capability from which SGLang chooses kernels that need stacks of experts in blocks
(srt/arg_groups/model_overrides/, "flashinfer_trtllm")."""


def _may_rearrange_experts() -> bool:
    """Return whether engines on GPUs like this process's may store stacks of experts in another form."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= BLACKWELL


def _filled(buckets: Sequence[Bucket], weights: NamedWeights) -> Iterator[tuple[Bucket, list[torch.Tensor]]]:
    """Yield each complete bucket with its tensors at once; at most one bucket a dtype is incomplete.

    Raises:
        WeightSyncError: a weight was not planned, or a planned one is missing.
    """
    buckets_of = {spec.name: (number, spec) for number, bucket in enumerate(buckets) for spec in bucket.specs}
    incomplete: dict[int, dict[str, torch.Tensor]] = {}
    done = 0
    for name, weight in weights:
        number, spec = buckets_of.get(name, (None, None))
        if number is None or spec != spec_of(name, weight):
            raise WeightSyncError(f"{spec_of(name, weight)} was exported as {name}; planned was {spec}")
        incomplete.setdefault(number, {})[name] = weight
        del weight
        if len(incomplete[number]) == len(buckets[number].specs):
            yield buckets[number], list(map(incomplete.pop(number).__getitem__, buckets[number].names))
            done += 1
    if done != len(buckets):
        raise WeightSyncError(f"{len(buckets)} buckets were planned, the weights filled {done}; the export has changed")


@contextmanager
def _on_one_thread() -> Iterator[None]:
    """Context in which torch uses one thread. Copying and summing a weight is so short that more threads mostly wait
    for each other, and they spin meanwhile on cores that an engine needs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _add(sent: Sequence[SentWeights], bucket: Bucket, tensors: Sequence[torch.Tensor]) -> None:
    for name, tensor in zip(bucket.names, tensors, strict=True):
        for digests in sent:
            digests.add(name, tensor)


def _require_finite(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
    # A sum needs one pass and no memory, and is not finite if an element is NaN or infinite. The sum of finite elements
    # may overflow, so then every element is inspected. The sums are read together, because a GPU waits at each read.
    floats = [(name, tensor) for name, tensor in zip(names, tensors, strict=True) if tensor.is_floating_point()]
    sums = torch.stack([tensor.sum(dtype=torch.float32) for _, tensor in floats]) if floats else torch.zeros(0)
    for (name, tensor), is_finite in zip(floats, sums.isfinite().tolist(), strict=True):
        if not is_finite and not bool(tensor.isfinite().all()):
            raise NonFiniteError(
                f"weight {name} holds NaN or infinity; it was not published. Resume from the last checkpoint with "
                "--load."
            )
