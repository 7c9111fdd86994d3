"""Functions of every form that a path may name."""


class Source:
    def __init__(self, args):
        self.buffer = []

    def get_samples(self, n):
        groups, self.buffer = self.buffer[:n], self.buffer[n:]
        return groups

    def add_samples(self, samples):
        self.buffer.extend(samples)


def rollout(args, rollout_id, data_source, evaluation=False): ...


async def generate(args, sample, sampling_params):
    return sample


def sample_hook(args, sample): ...


def buffer_filter(args, rollout_id, buffer, n):
    return buffer[:n]


def keep(args, samples):
    return True


def mark(args, groups): ...


def see_all(args, all_groups, data_source): ...


def post_process(args, samples):
    rewards = [sample.reward for sample in samples]
    return rewards, rewards


def convert(args, samples):
    return {}


def log(rollout_id, args, samples, metrics, rollout_time):
    return False


def eval_log(rollout_id, args, data, metrics):
    return False


def postprocess(args, rollout_id, rollout_data): ...


def advantages(args, rollout_data): ...


def loss(args, batch, logits, sum_of_sample_mean):
    return logits.sum(), {}


def correct(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs):
    return pg_loss, loss_masks, {}


def reducer(total_lengths, response_lengths, loss_masks, per_token):
    return sum


def provider(pre_process, post_process): ...


def layer_spec(args, config, vp_stage): ...


def started(args): ...


def before_log_prob(args, model, store_prefix): ...


def before_step(args, rollout_id, step_id, model, optimizer, scheduler): ...


def written(args, version_dir, rollout_engines): ...
