"""Replays one rollout in every layout of the learner and prints how far each is from one rank.

    python bench/layouts.py [--json FILE]        half a minute on two idle cores; exit code 1 if a bound is broken

Two optimizer steps, of five and seven micro-batches of ragged samples, every term of the loss: clipped policy loss,
divergence from a reference with other weights, entropy. In the cases called ``tokens`` advantages are estimated on the
ranks, token by token, and the loss is corrected, by token and by sequence. Compared with one rank: the loss and every
metric, the norm of the gradient, the gradient of every weight under its Hugging Face name (relative L2 norm of the
difference), and the weights after each step. Every step starts from the weights that one rank had there, bit for bit:
what is compared is the layout, not how far a last bit of the first step grows in the second. One rank in turn is
compared with Hugging Face transformers and torch.autograd.

This process imports the engines once; the ranks are forked from it, fresh ones for every layout.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import shutil
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import slime_core
from slime_core.builtin.arithmetic.task import EOS_ID, VOCABULARY
from slime_core.config.schema import AlgorithmConfig, ClusterConfig, ModelConfig, OptimizerConfig, RunConfig
from slime_core.cpu.megatron import install
from slime_core.learner.layout import ParallelLayout
from slime_core.plugins.contracts import (
    CorrectionOutput,
    CorrectionTerms,
    LossOutput,
    LossTerms,
    Reductions,
    ResponseTokens,
    TokenAdvantages,
)
from slime_core.rollout.plan import BatchPlan
from slime_core.rollout.shards import loss_masks, make_shards
from slime_core.types import Sample, Status, TrainBatch

ARITHMETIC = Path(slime_core.__file__).parent / "builtin" / "arithmetic"
MODEL, PROBLEMS = ARITHMETIC / "model", ARITHMETIC / "data" / "train.jsonl"
ALGORITHM = {"use_kl_loss": True, "kl_loss_coef": 0.05, "kl_loss_type": "k3", "entropy_coef": 0.02}
ESTIMATED = {
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "entropy_coef": 0.0,
    "advantage_estimator": "reinforce_plus_plus",
    "gamma": 0.9,
    "kl_coef": 3.0,
    "corrections": ("tis",),
    "tis_clip": 0.2,
    "tis_clip_low": 0.05,
}
"""The policy loss alone, so that nothing else makes the gradients. Some ratios lie between the bounds, some beyond."""
ADAM = {"lr": 1e-4, "weight_decay": 0.1, "adam_beta2": 0.95, "adam_eps": 1e-5, "clip_grad": 0.5}
TEMPERATURE, NUM_SAMPLES, NUM_STEPS, MAX_TOKENS = 1.0, 24, 2, 100
TIMEOUT_S = 90
NOISE, SMALLEST_WEIGHT = 0.05, 0.05

ARCHITECTURE = "Qwen3ForCausalLM"
USUAL = ("fresh", "token")
BOUND, TRAINED_BOUND = 1e-5, 1e-4
"""Largest relative difference in fp32 that counts as equal; the order of additions alone makes some 1e-6.

Where the weights are trained, the terms of a gradient nearly cancel, and rounding counts for more: one rank alone is
then 1e-5 and more away from the same step in float64, as the table shows. Hence the second bound.
"""


@dataclass(frozen=True)
class Case:
    """One layout on some ranks; ``model`` and ``loss`` say which single rank it is compared with."""

    layout_name: str
    ranks: int
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    model: str = "fresh"
    loss: str = "token"

    @property
    def name(self) -> str:
        """With what is unusual about it."""
        return ", ".join([self.layout_name, *(word for word in (self.model, self.loss) if word not in USUAL)])


CASES = (
    Case("DP1", 1),
    Case("DP2", 2),
    Case("TP2", 2, ParallelLayout(tensor=2)),
    Case("TP2, SP", 2, ParallelLayout(tensor=2, sequence=True)),
    Case("PP2", 2, ParallelLayout(pipeline=2)),
    Case("PP2, VPP2", 2, ParallelLayout(pipeline=2, virtual_pipeline=2)),
    Case("CP2", 2, ParallelLayout(context=2)),
    Case("CP4", 4, ParallelLayout(context=4)),
    Case("TP2, SP, CP2", 4, ParallelLayout(tensor=2, sequence=True, context=2)),
    Case("TP2, PP2", 4, ParallelLayout(tensor=2, pipeline=2)),
    Case("DP2, CP2", 4, ParallelLayout(context=2)),
    Case("DP1", 1, loss="sequence"),
    Case("CP2", 2, ParallelLayout(context=2), loss="sequence"),
    Case("DP1", 1, loss="tokens"),
    Case("DP2", 2, loss="tokens"),
    Case("TP2", 2, ParallelLayout(tensor=2), loss="tokens"),
    Case("CP2", 2, ParallelLayout(context=2), loss="tokens"),
    Case("PP2", 2, ParallelLayout(pipeline=2), loss="tokens"),
    Case("DP2, CP2", 4, ParallelLayout(context=2), loss="tokens"),
    Case("DP1", 1, model="tied"),
    Case("PP2", 2, ParallelLayout(pipeline=2), model="tied"),
    Case("DP1", 1, model="experts"),
    Case("EP2", 2, ParallelLayout(expert=2), model="experts"),
    Case("TP2, SP", 2, ParallelLayout(tensor=2, sequence=True), model="experts"),
    Case("DP1", 1, model="trained"),
    Case("TP2, SP", 2, ParallelLayout(tensor=2, sequence=True), model="trained"),
    Case("CP2", 2, ParallelLayout(context=2), model="trained"),
)
"""The first of a model and a loss is what the others of the same are compared with.

Models, all in the shape of the embedded one: ``fresh`` weights; the same with ``tied`` embeddings; a small one with
``experts``; and ``trained``, the embedded weights themselves. Losses: clipped, by ``token``; one ratio a ``sequence``;
and clipped, with ``tokens`` that each have an advantage and a correction.
"""


@dataclass(frozen=True)
class Difference:
    """How far a layout is from its single rank; relative numbers, the largest over both steps.

    Arguments:
        loss, grad_norm: of the loss and of the norm of the gradient.
        metric: of the worst metric; absolute where a metric is below 1.
        gradient: largest relative L2 norm of the difference of one weight's gradient.
        worst: the step and the weight where that is.
        weights: largest absolute difference of a weight after a step.
        seconds: of the whole replay, start of the ranks included.
    """

    layout: str
    ranks: int
    loss: float
    grad_norm: float
    metric: float
    gradient: float
    worst: str
    weights: float
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """What the ranks of one case report, an entry an optimizer step: gradients before it, weights after it."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)
    seconds: float = 0.0


# --- The rollout ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rollout:
    """One rollout, replayed in every case."""

    samples: list[Sample]
    advantages_B: np.ndarray


def make_rollout(model: Any) -> Rollout:
    """Conversations of 1 to 7 sums that ``model`` answered, of 10 to 62 tokens; one sample removed.

    The first sum is the prompt, and what the user says later is masked.
    """
    random = np.random.default_rng(0)
    torch.manual_seed(0)
    problems = [json.loads(line)["prompt"] for line in PROBLEMS.read_text().splitlines()]
    samples = [
        converse(model, index, random.choice(problems, random.integers(1, 8)).tolist()) for index in range(NUM_SAMPLES)
    ]
    samples[7].remove_sample = True
    return Rollout(samples, random.normal(size=NUM_SAMPLES).astype(np.float32))


def converse(model: Any, index: int, problems: list[str]) -> Sample:
    """The log-probabilities are those of ``model`` and some noise, as if an engine had computed in less precision."""
    tokens, mask = [], []
    for problem in problems:
        asked = [VOCABULARY.index(token) for token in ("<|user|>", *problem, "<|assistant|>")]
        answer = sample_answer(model, tokens + asked)
        tokens += asked + answer
        mask += [0] * len(asked) + [1] * len(answer)
    prompt_length = mask.index(1)
    sample = Sample(
        group_index=index // 4,
        index=index,
        tokens=tokens,
        response_length=len(tokens) - prompt_length,
        loss_mask=mask[prompt_length:],
        status=Status.COMPLETED,
    )
    with torch.no_grad():
        log_probs_U = log_probs(model, sample)[0]
    sample.rollout_log_probs = (log_probs_U + 0.01 * torch.randn_like(log_probs_U)).tolist()
    return sample


def sample_answer(model: Any, tokens: list[int]) -> list[int]:
    """Up to the end of the answer, or four tokens."""
    answer: list[int] = []
    while len(answer) < 4 and EOS_ID not in answer:
        with torch.no_grad():
            logits_V = model(torch.tensor([tokens + answer])).logits[0, -1]
        answer.append(int(torch.multinomial((logits_V / TEMPERATURE).softmax(-1), 1)))
    return answer


def shards(rollout: Rollout, num_ranks: int, loss: str) -> list[TrainBatch]:
    """Where the learner estimates advantages, what is the advantage elsewhere is the reward."""
    return make_shards(
        rollout.samples,
        None if loss == "tokens" else rollout.advantages_B,
        BatchPlan(num_ranks=num_ranks, num_steps=NUM_STEPS, max_tokens=MAX_TOKENS),
        rewards_B=rollout.advantages_B,
        rollout=0,
        temperature=TEMPERATURE,
    )


def sequence_loss(terms: LossTerms) -> LossOutput:
    """One importance ratio a sequence, the geometric mean of its tokens' (GSPO, 2507.18071, eq. 7), not clipped."""
    counts_b = terms.segments.sums(terms.mask_T).clamp(min=1)
    logs_b = terms.segments.sums(terms.mask_T * (terms.log_probs_T - terms.old_log_probs_T)) / counts_b
    ratio_T = terms.segments.spread(logs_b.exp())
    return LossOutput(-ratio_T * terms.advantages_T, {"sequence_ratio": ratio_T.detach()})


def sequence_correction(terms: CorrectionTerms) -> CorrectionOutput:
    """Weighs a sequence by the geometric mean of its ratios, and leaves out those where it is smallest."""
    counts_b = terms.segments.sums(terms.mask_T).clamp(min=1)
    logs_b = terms.segments.sums(terms.mask_T * (terms.log_probs_T - terms.rollout_log_probs_T)) / counts_b
    ratio_T = terms.segments.spread(logs_b.exp())
    mask_T = terms.mask_T.where(ratio_T >= SMALLEST_WEIGHT, 0.0)
    return CorrectionOutput(ratio_T, mask_T, {"sequence_weight": ratio_T, "left": mask_T})


class Counting:
    """An estimator that also reports how many tokens the batch trains, and whose advantages are 1 on average.

    Whitening divides one sum by another, so a shard that is counted twice alike would not show; and its loss is a
    difference of nearly equal sums, of which rounding would take a large share.
    """

    def __init__(self, estimator: Any) -> None:
        self._estimator = estimator

    def estimate(self, batch: ResponseTokens, reduce: Reductions) -> TokenAdvantages:
        found = self._estimator.estimate(batch, reduce)
        count_U = reduce.sum(batch.mask_U.sum()).expand_as(batch.mask_U)
        metrics_U = {**found.metrics_U, "batch_tokens": count_U}
        return replace(found, advantages_U=found.advantages_U + 1, metrics_U=metrics_U)


# --- One rank ---------------------------------------------------------------------------------------------------------


def run_config(folder: Path, loss: str) -> RunConfig:
    return RunConfig(
        cluster=ClusterConfig(device="cpu"),
        algorithm=AlgorithmConfig(**ALGORITHM | (ESTIMATED if loss == "tokens" else {})),
        model=ModelConfig(ref_load=folder / "reference"),
        optimizer=OptimizerConfig(**ADAM),
    )


def build(case: Case, rank: int, address: str, folder: Path) -> Any:
    from slime_core.learner import rank as module
    from slime_core.learner.corrections import NamedCorrection
    from slime_core.learner.rank import Learner, LearnerSettings
    from slime_core.learner.spec import MBridgeSpec
    from slime_core.plugins.registry import activate

    if case.model == "experts":
        module._model_spec = lambda *_: MBridgeSpec()  # no plugin claims the architecture yet
    settings = LearnerSettings(
        run_config(folder / case.model, case.loss),
        folder / case.model / "actor",
        ARCHITECTURE,
        "clipped",
        {},
        num_steps=100,
        rank=rank,
        world_size=case.ranks,
        address=address,
        num_threads=1,
        layout=case.layout,
    )
    plugins = ["ppo"] if case.loss == "tokens" else []
    learner = Learner(settings, activate(plugins, architecture=ARCHITECTURE).registry)
    if case.loss == "sequence":
        learner._objective._policy_loss = sequence_loss
    if case.loss == "tokens":
        corrections = learner._objective.corrections
        corrections._named += (NamedCorrection(sequence_correction, "sequence correction"),)
        learner._estimation._estimator = Counting(learner._estimation._estimator)
    return learner


def record(learner: Any, given: Path) -> Outcome:
    """Filled as the learner trains. Where ``given`` holds weights, the step after the first one starts from those."""
    from slime_core.learner.gradients import named_gradients

    found, finish, whole_step = Outcome(), learner.actor.optimizer.step, learner._step

    def optimizer_step() -> Any:
        found.gradients.append(named_gradients(learner._spec, learner.actor.model))
        return finish()

    def step(*arguments: Any, **options: Any) -> dict[str, float]:
        found.metrics.append(whole_step(*arguments, **options))
        found.weights.append({name: weight.clone() for name, weight in learner.export_weights()})
        if len(found.weights) == 1 and given.exists():
            learner._spec.load_weights(learner.actor.chunks, given)
        return found.metrics[-1]

    learner.actor.optimizer.step, learner._step = optimizer_step, step
    return found


def carry_out(case: Case, rollout: Rollout, rank: int, address: str, folder: Path, target: Path) -> None:
    """Runs in a forked process: trains the shard of ``rank``, and writes what it found to ``target``."""
    learner = build(case, rank, address, folder)
    found = record(learner, folder / case.model / case.loss)
    parts = shards(rollout, case.layout.data_size(case.ranks), case.loss)
    learner.train(parts[case.layout.data_rank(rank, world_size=case.ranks)])
    torch.save(asdict(found), target)
    learner.close()


# --- All ranks --------------------------------------------------------------------------------------------------------


def replay(case: Case, rollout: Rollout, folder: Path) -> Outcome:
    """The case on freshly forked ranks.

    Raises:
        SystemExit: a rank failed or hung (its traceback is on standard error), or the ranks disagree.
    """
    began = time.monotonic()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    targets = [folder / f"rank-{rank}.pt" for rank in range(case.ranks)]
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=carry_out, args=(case, rollout, rank, address, folder, target))
        for rank, target in enumerate(targets)
    ]
    for rank in ranks:
        rank.start()
    await_all(case, ranks)
    found = [torch.load(target, weights_only=True) for target in targets]
    if any(other["metrics"] != found[0]["metrics"] for other in found):
        sys.exit(f"{case.name}: the ranks report different metrics")
    return replace(Outcome(**found[0]), seconds=time.monotonic() - began)


def await_all(case: Case, ranks: list[Any]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while any(rank.is_alive() for rank in ranks) and time.monotonic() < deadline:
        if any(rank.exitcode for rank in ranks):
            break
        time.sleep(0.01)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.join()
    if any(code != 0 for code in codes):
        sys.exit(f"{case.name}: exit codes {codes}; None: was still running")


# --- Hugging Face and torch -------------------------------------------------------------------------------------------


class HuggingFace:
    """The loss of the first step, each sample alone, with plain transformers and torch.autograd."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        self.model, self.reference = (
            AutoModelForCausalLM.from_pretrained(folder / name, dtype=dtype) for name in ("actor", "reference")
        )

    def first_step(self, rollout: Rollout) -> tuple[float, dict[str, torch.Tensor]]:
        """The loss and the gradients."""
        count = NUM_SAMPLES // NUM_STEPS
        masks = [torch.from_numpy(mask) for mask in loss_masks(rollout.samples[:count])]
        rows = zip(rollout.samples[:count], masks, rollout.advantages_B[:count].tolist(), strict=True)
        losses = [self.of_sample(*row) for row in rows if row[1].sum() > 0]
        loss = torch.stack(losses).mean()
        loss.backward()
        return loss.item(), {name: parameter.grad.float() for name, parameter in self.model.named_parameters()}

    def of_sample(self, sample: Sample, mask_U: torch.Tensor, advantage: float) -> torch.Tensor:
        now_U, entropy_U = log_probs(self.model, sample)
        with torch.no_grad():
            other_U, _ = log_probs(self.reference, sample)
        ratio_U = (now_U - now_U.detach()).exp()
        kl_U = (other_U - now_U).exp() - 1 - (other_U - now_U)
        loss_U = -ratio_U * advantage + 0.05 * kl_U - 0.02 * entropy_U
        return (mask_U * loss_U).sum() / mask_U.sum()


def log_probs(model: Any, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    ids_T = torch.tensor(list(sample.tokens))
    logits_UV = model(ids_T[None]).logits[0, sample.prompt_length - 1 : -1] / TEMPERATURE
    log_p_UV = logits_UV.log_softmax(-1)
    return log_p_UV.gather(1, ids_T[sample.prompt_length :, None])[:, 0], -(log_p_UV.exp() * log_p_UV).sum(-1)


HUGGING_FACE = (
    ("Hugging Face", torch.float32, "fresh"),
    ("Hugging Face, trained", torch.float32, "trained"),
    ("float64, trained", torch.float64, "trained"),
)
"""What one rank is compared with, in the first step: name, type of all numbers, model."""


# --- The comparison ---------------------------------------------------------------------------------------------------


def relative(found: float, expected: float) -> float:
    return abs(found - expected) / max(abs(expected), 1e-30)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def worst_gradient(found: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]]) -> tuple[float, str]:
    """Over all steps and weights: the largest distance, and where it is."""
    all_of_them = []
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        if mine.keys() != theirs.keys():
            sys.exit(f"different weights: {sorted(mine.keys() ^ theirs.keys())}")
        all_of_them += [(distance(mine[name], theirs[name]), f"{number}: {name}") for name in mine]
    return max(all_of_them)


def compare(case: Case, found: Outcome, expected: Outcome) -> Difference:
    pairs = list(zip(found.metrics, expected.metrics, strict=True))
    if any(mine.keys() != theirs.keys() for mine, theirs in pairs):
        sys.exit(f"{case.name}: different metrics")
    apart = {name: max(relative(mine[name], theirs[name]) for mine, theirs in pairs) for name in ("loss", "grad_norm")}
    metric = max(abs(mine[name] - theirs[name]) / max(abs(theirs[name]), 1) for mine, theirs in pairs for name in mine)
    gradient, worst = worst_gradient(found.gradients, expected.gradients)
    weights = max(
        float((mine[name] - theirs[name]).abs().max())
        for mine, theirs in zip(found.weights, expected.weights, strict=True)
        for name in theirs
    )
    return Difference(
        layout=case.name,
        ranks=case.ranks,
        loss=apart["loss"],
        grad_norm=apart["grad_norm"],
        metric=metric,
        gradient=gradient,
        worst=worst,
        weights=weights,
        seconds=found.seconds,
    )


def compare_with_hugging_face(
    name: str, dtype: torch.dtype, folder: Path, rollout: Rollout, found: Outcome
) -> Difference:
    began = time.monotonic()
    loss, gradients = HuggingFace(folder, dtype).first_step(rollout)
    norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
    gradient, worst = worst_gradient(found.gradients[:1], [gradients])
    apart = relative(found.metrics[0]["loss"], loss), relative(found.metrics[0]["grad_norm"], norm)
    return Difference(name, 1, *apart, max(apart), gradient, worst, math.nan, time.monotonic() - began)


# --- The table --------------------------------------------------------------------------------------------------------


def make_models(folder: Path) -> None:
    """``folder/MODEL/actor`` and ``folder/MODEL/reference``, which differ by some noise; MODEL as in ``CASES``."""
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    shape = {"initializer_range": 0.1, "dtype": torch.float32}
    fresh, tied = (
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL, **shape, tie_word_embeddings=is_tied))
        for is_tied in (False, True)
    )
    config = Qwen3MoeConfig(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=128,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    experts = Qwen3MoeForCausalLM(config)
    trained = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    for name, model in {"fresh": fresh, "tied": tied, "experts": experts, "trained": trained}.items():
        model.save_pretrained(folder / name / "actor")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(NOISE * parameter.std() * torch.randn_like(parameter))
        model.save_pretrained(folder / name / "reference")


def save_weights(weights: dict[str, torch.Tensor], folder: Path, name: str) -> None:
    """As a Hugging Face folder beside the actor's."""
    from safetensors.torch import save_file

    (folder / name).mkdir()
    shutil.copy(folder / "actor" / "config.json", folder / name)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / name / "model.safetensors")


def measure(cases: Sequence[Case]) -> list[Difference]:
    """Every case against the first of its model and loss, and that against Hugging Face."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_models(folder)
        rollout = make_rollout(HuggingFace(folder / "trained", torch.float32).model)
        alone: dict[tuple[str, str], Outcome] = {}
        found = []
        for case in cases:
            outcome = replay(case, rollout, folder)
            if (case.model, case.loss) in alone:
                found.append(compare(case, outcome, alone[case.model, case.loss]))
            else:
                alone[case.model, case.loss] = outcome
                save_weights(outcome.weights[0], folder / case.model, case.loss)
        return [
            *(
                compare_with_hugging_face(name, dtype, folder / model, rollout, alone[model, "token"])
                for name, dtype, model in HUGGING_FACE
                if (model, "token") in alone
            ),
            *found,
        ]


def print_table(found: list[Difference]) -> None:
    print("| layout | ranks | loss | gradient norm | worst metric | worst gradient of a weight | weights | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for row in found:
        print(
            f"| {row.layout} | {row.ranks} | {row.loss:.1e} | {row.grad_norm:.1e} | {row.metric:.1e} "
            f"| {row.gradient:.1e} ({row.worst}) | {row.weights:.1e} | {row.seconds:.1f} |"
        )


def prepare() -> None:
    """Import what every rank needs, once, before any of them is forked."""
    install()
    # Megatron warns about its own calls between its own modules.
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="megatron")
    warnings.filterwarnings("ignore", message="The .grad attribute|When using", module="megatron")
    # torch 2.13 renamed what Megatron calls.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    torch.set_num_threads(1)
    import mbridge  # noqa: F401
    import transformers  # noqa: F401

    import slime_core.learner.gradients
    import slime_core.learner.passes
    import slime_core.learner.rank  # noqa: F401


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--only", nargs="*", help="of the compared layouts, replay only these")
    options = parser.parse_args()
    prepare()
    wanted = [case for case in CASES if not options.only or case.name in options.only]
    kinds = {(case.model, case.loss) for case in wanted}
    found = measure([c for c in CASES if c in wanted or (c.layout_name == "DP1" and (c.model, c.loss) in kinds)])
    print_table(found)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in found]))
    sys.exit(any(not max(row.loss, row.grad_norm, row.gradient) <= bound(row.layout) for row in found))


def bound(name: str) -> float:
    return TRAINED_BOUND if "trained" in name else BOUND


if __name__ == "__main__":
    main()
