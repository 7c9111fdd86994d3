"""Part 6: four layers of Qwen3-30B-A3B's shape: a step beside transformers, and where the time of a step goes."""

from __future__ import annotations

from typing import Any

from torch.profiler import ProfilerActivity, profile

from gpu_kit.learner import LAYERS, QWEN3, Shape, attempt, built, draw, shard_of, write_model
from gpu_kit.report import ON_GPU, free_memory, report, report_limit, sized

MIXTURE: Shape = {
    # A smaller vocabulary than Qwen's: the layers are measured.
    **{**QWEN3, "model_type": "qwen3_moe", "vocab_size": sized(32_768, 512), "tie_word_embeddings": False},
    **dict(zip(LAYERS, sized((2048, 6144, 4, 32, 4), (64, 96, 2, 4, 2)), strict=True)),
    **{"moe_intermediate_size": sized(768, 32), "num_experts": sized(128, 8), "num_experts_per_tok": sized(8, 2)},
    "norm_topk_prob": True,
}
ROW, TOKENS = sized((4096, 16_384), (128, 256))
NEAR = sized(0.1, 1e-4)
"""As in part 5; two experts that nearly tie may be chosen differently in bfloat16."""

KINDS = {
    "grouped products": ("_grouped_mm",),
    "permuting tokens": (
        *("index_select", "gather", "scatter", "index_add", "index_copy", "aten::index", "sort", "topk", "nonzero"),
        *("masked_select", "aten::cat", "aten::stack", "bincount", "histc", "cumsum"),
    ),
    "attention": ("attention", "flash"),
    "other products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear"),
    "optimizer and gradients": ("adamw", "foreach", "norm"),
}
"""Kind -> parts of the names of its operations; the first kind that matches counts."""

WAITS = sized(("StreamSynchronize", "DeviceSynchronize", "EventSynchronize"), ("_local_scalar_dense",))


def main() -> None:
    """Report a step of the mixture and its profile."""
    with attempt("a mixture of random weights"):
        folder, loop = write_model(MIXTURE)
        samples = draw(length=ROW // 2, total=TOKENS, vocabulary=MIXTURE["vocab_size"])
        loop.fill_log_probs(samples)
        del loop
        free_memory()
        shard = shard_of(samples, ROW)
        with built(folder, ROW, "none", size=MIXTURE) as trained:
            difference = trained.learner.train(shard)["train/train_rollout_logprob_abs_diff"]
            report_limit("log-probabilities beside transformers'", difference, NEAR, "nats")
            trained.report_steps(shard)
            report_profile(trained.learner, shard)


def report_profile(learner: Any, shard: Any) -> None:
    """Report the time of each kind of operation, and the waits of the host, in one step."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]
    with profile(activities=activities) as recorded:
        learner.train(shard)
    events = recorded.key_averages()
    times: dict[str, float] = dict.fromkeys([*KINDS, "the rest"], 0.0)
    for event in events:
        name = event.key.lower()
        kind = next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "the rest")
        times[kind] += event.self_device_time_total if ON_GPU else event.self_cpu_time_total
    total = sum(times.values())
    for kind, microseconds in times.items():
        expected = "most, on a GPU" if kind == "grouped products" else ""
        report(f"time of {kind}", 100 * microseconds / total, "%", expected=expected)
    waits = [event for event in events if any(name in event.key for name in WAITS)]
    layers = MIXTURE["num_hidden_layers"] * len(shard.steps[0].micro_batches)
    what = "waits of the host for the GPU" if ON_GPU else "numbers that the host reads"
    report(f"{what}, a layer and row", sum(event.count for event in waits) / layers, expected="below 1 on a GPU")
    if ON_GPU:
        waited = sum(event.self_cpu_time_total for event in waits)
        report("time of these waits", waited / 1e3, "ms", expected=f"of {total / 1e3:.0f} ms of kernels")


if __name__ == "__main__":
    main()
