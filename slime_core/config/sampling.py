"""Section [rollout]: how responses are generated and rewarded."""

from __future__ import annotations

from typing import Annotated, Literal

from slime_core.config.options import NO_ENGINES, ONE_HALF, Conflicts, Needs
from slime_core.config.reward_sum import RewardSum
from slime_core.config.section import All, Count, CountOrZero, Name, Positive, Section, Share

__all__ = ["RolloutConfig"]


class RolloutConfig(Section):
    """How responses are generated and rewarded."""

    num_rollout: Count = 200
    """Rollouts of the run; each is generated, trained on and published once."""
    rollout_batch_size: Count = 32
    """Prompts a rollout."""
    n_samples_per_prompt: Count = 8
    """Responses a prompt; together they are its group."""
    rollout_temperature: Positive = 1.0
    """Sampling temperature; the learner divides its logits by the same number."""
    rollout_top_p: Share = 1.0
    """Nucleus sampling: keep the likeliest tokens up to this probability mass. 1: all.

    What was kept at each place is recorded, and the learner's log-probabilities are over just that.
    """
    rollout_top_k: All | Count = -1
    """Keep the k likeliest tokens, of which the same holds. -1: all."""
    rollout_max_kept_tokens: Count = 64
    """Tokens that rollout_top_p keeps at most, where no rollout_top_k says it; the engine draws from no others.

    So many are asked for at every place, at about 30 bytes each of an answer. Evaluations have no such bound.
    """
    rollout_max_response_len: Count = 1024
    """Longest response in tokens; longer ones are cut and marked truncated."""
    rollout_stop: tuple[Name, ...] = ()
    """Texts that end a response. Empty: only the end-of-sequence token does."""
    rollout_stop_token_ids: tuple[CountOrZero, ...] = ()
    """Token ids that end a response, besides the tokenizer's end-of-sequence token."""
    rollout_source: Name | None = None
    """Component that makes whole rollouts; of kind rollout_source. None: generate_function makes every group."""
    generate_function: Name = "single_turn"
    """Component that turns a prompt into a response; of kind generate_function."""
    rm_type: RewardSum = "exact_match"
    """Component that rewards responses; of kind reward_model. Or a sum of several: 0.7*math+0.3*f1.

    A file may have a table of weights: rm_type = { math = 0.7, "dapo:acc" = 0.3 }, or [rollout.rm_type].
    """
    reward_key: Name | None = None
    """Which of a reward model's named numbers trains. None: rewards are plain numbers."""
    log_passrate: bool = False
    """Also log how often one of k responses of a rollout reaches eval_pass_threshold, as rollout/pass@K."""
    rm_model: Name | None = None
    """Auxiliary model that reward models may ask, by its name in engine_models. None: no such model."""
    sample_transforms: tuple[Name, ...] = ()
    """Components that keep, drop, mask or shape finished groups, in this order; of kind sample_transform. Empty: none.

    Dropped groups are counted by reason and replaced by groups of other prompts. Evaluations are not transformed.
    """
    rollout_max_refills: CountOrZero = 100
    """Rounds of other prompts that may replace dropped groups before the run ends. 0: train on what is kept."""
    over_sampling_batch_size: Count | None = None
    """Prompts begun at once when groups are missing, at least rollout_batch_size. None: as many as are missing.

    The rollout takes those that finish first. What has finished besides waits for the next rollout; what has not is
    ended, and comes again, unless generation runs ahead (async_buffer_size).
    """
    partial_rollout: Annotated[
        bool, Conflicts("max_staleness", equals=0, because="older weights began what is resumed")
    ] = False
    """Go on with responses that were ended before their time, from the tokens they have. False: begin them anew.

    It takes a generate function that can, as single_turn does; others begin anew what was not finished.
    """
    mask_offpolicy_in_partial_rollout: Annotated[
        bool, Needs("partial_rollout", because="no other response is resumed")
    ] = False
    """Train only those tokens of such a response that were drawn after it was taken up again."""
    failed_samples: Literal["drop_sample", "drop_group", "retry"] = "drop_sample"
    """What a sample does to its group that no engine answered or no reward model scored. None is ever trained on.

    drop_sample: the others of its group are trained, with statistics of their own. drop_group: another prompt takes the
    place of the group. retry: the sample is generated again, unless it was refused (4xx), and then dropped.
    """
    failed_sample_retries: Annotated[Count, Needs("failed_samples", equals="retry")] = 2
    """How often, with failed_samples = retry."""
    reward_num_workers: Count | None = None
    """Processes that score responses; each works on several calls that wait for something at once.

    None: one for two cores of the sampler's machine, 2 to 16. As many more repeat what was lost where one has died.
    """
    reward_timeout_s: Positive = 30.0
    """Seconds that scoring may take; beyond, its process is ended and only the sample in question is lost."""
    reward_memory_gib: Positive = 4.0
    """Memory of one such process in GiB; beyond, the same happens."""
    async_buffer_size: Annotated[
        CountOrZero,
        Conflicts("colocate", because="engines and learner take turns on the same devices"),
        Conflicts("rollout_source", because="it makes whole rollouts when it is called"),
        Conflicts("debug_rollout_only", because="nothing is trained meanwhile"),
        Conflicts(*NO_ENGINES, because="nothing is generated"),
    ] = 0
    """Rollouts that may be generated ahead while the learner trains. 0: none, generation starts when the loop asks.

    1: one step ahead. What is generated ahead is trained with newer weights than drew it: see max_staleness.
    """
    max_staleness: Annotated[
        CountOrZero | None, Conflicts(*ONE_HALF, because="learner and engines do not both run")
    ] = None
    """How many trained rollouts older the weights that drew a sample's first token may be than those it trains.

    0: exactly on-policy. None: as old as async_buffer_size and update_weights_interval make them, and never refused.
    """
    stale_samples: Annotated[
        Literal["requeue", "correct", "evict"],
        Needs("max_staleness", because="otherwise no sample is stale"),
        Needs(
            "corrections",
            "use_rollout_logprobs",
            "custom_tis_function_path",
            when="correct",
            because="something has to weigh stale samples",
        ),
    ] = "requeue"
    """What becomes of samples above max_staleness: the prompt comes again, they are trained, or they are left out.

    correct needs a correction that compares learner and engine, or use_rollout_logprobs; no rollout waits for a slow
    group then.
    """
    pause_generation_mode: Annotated[
        Literal["retract", "in_place", "abort"],
        Needs("async_buffer_size", because="otherwise nothing is in flight when weights are published"),
    ] = "retract"
    """What becomes of requests in flight when weights are published. retract: they go on, with their cache recomputed.

    in_place: they go on with the cache of the old weights. abort: they end, and their prompts come again.
    """
    sglang_server_concurrency: Count = 64
    """Requests in flight an engine; the rest wait in the sampler."""
    rollout_request_timeout_s: Positive = 300.0
    """Seconds after which one generation request counts as failed."""
