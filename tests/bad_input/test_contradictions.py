"""Settings that do not go together, or have no effect together."""

from __future__ import annotations

from pathlib import Path

from tests.bench.refusals import Refusal, refuses


@refuses("""
    train: {advantage: none}
    ---
    train: {advantage: none, teacher: {weights: start}}
    > run.yaml: train.advantage none ignores rewards, so the run needs a teacher other than version 0 of the
    > policy: set train.teacher, or use train.advantage group
    rollout: {gate: varied}
    train: {advantage: none, teacher: {model: teacher}}
    ---
    rollout: {curriculum: {pool: 100}}
    train: {advantage: none, teacher: {model: teacher}}
    ---
    train: {advantage: none, teacher: {model: teacher}, select: {kind: extremes, keep: 2}}
    ---
    train: {advantage: none, teacher: {model: teacher}, loss: {kl: {coefficient: 1, place: reward}}}
    > run.yaml: rollout.gate, rollout.curriculum, train.select and train.loss.kl with `place: reward` use
    > rewards, which have no effect with train.advantage none: leave these settings out
    train: {advantage: none, teacher: {model: teacher}, critic: {}}
    > run.yaml: train.critic has no effect with train.advantage none: use train.advantage gae, or leave
    > train.critic out
    rollout: {top_k: 5}
    train: {advantage: none, teacher: {url: 'http://host:8000', tokenizer: folder, divergence: sampled}}
    ---
    rollout: {outside_groups: 1}
    train: {advantage: none, teacher: {url: 'http://host:8000', tokenizer: folder, divergence: sampled}}
    > run.yaml: train.teacher.url gives log-probs at temperature 1 of the whole vocabulary: leave out
    > rollout.temperature, top_p, top_k and outside_groups (external agents choose their own sampling), or set
    > train.teacher.model instead of train.teacher.url
    train: {advantage: none, teacher: {}}
    > run.yaml line 1: train.teacher: set exactly one of `model`, `url` and `weights`; given: none of them
    train: {advantage: none, teacher: {model: teacher, weights: start}}
    > run.yaml line 1: train.teacher: set exactly one of `model`, `url` and `weights`; given: model and
    > weights
    train: {advantage: none, teacher: {url: 'http://host:8000', tokenizer: folder}}
    > run.yaml line 1: train.teacher: the server at `url` returns only log-probs of sampled tokens: set
    > `divergence` to sampled, or set `model` instead of `url`
    train: {advantage: none, teacher: {url: 'http://host:8000', divergence: sampled}}
    > run.yaml line 1: train.teacher: set both `url` and `tokenizer`, or neither: `tokenizer` is the folder
    > with the tokenizer of the teacher at `url`
    environment: {judges: {quality: {}}}
    > run.yaml line 1: environment.judges.quality: set either `url` or `model` for the judge; given: neither
    environment: {judges: {quality: {url: 'http://host:8000/v1', model: folder}}}
    > run.yaml line 1: environment.judges.quality: set either `url` or `model` for the judge; given: both
    environment: {judges: {quality: {model: folder, name: it}}}
    > run.yaml line 1: environment.judges.quality: `name` selects a model on the server at `url`, but this
    > judge has no `url`: leave `name` out
    environment: {judges: {quality: {model: folder, max_tokens_per_iteration: 99, max_tokens: 256}}}
    > run.yaml line 1: environment.judges.quality: max_tokens_per_iteration (99) is less than max_tokens of
    > one reply (256): raise max_tokens_per_iteration, or leave it out
    rollout: {group_size: 1}
    > run.yaml: train.advantage group compares the sessions of a group, but rollout.group_size is 1: raise
    > rollout.group_size, or use train.advantage whitened
    rollout: {group_size: 1}
    train: {advantage: {kind: whitened, baseline: true}}
    > run.yaml: train.advantage whitened compares the sessions of a group, but rollout.group_size is 1: raise
    > rollout.group_size, or use train.advantage whitened
    rollout: {group_size: 1, gate: varied}
    train: {advantage: whitened}
    > run.yaml: rollout.gate varied drops groups in which all rewards are equal, so with rollout.group_size 1
    > the gate would drop every group
    rollout: {outside_groups: 5, groups_per_batch: 4}
    > run.yaml: rollout.outside_groups (5) must not exceed rollout.groups_per_batch (4)
    rollout: {failed_reward: -1}
    train: {advantage: relative}
    > run.yaml: train.advantage relative does not support negative rewards, but rollout.failed_reward is -1
    rollout: {temperature: 0}
    train: {weights: [surprising]}
    > run.yaml: train.weights cannot rank tokens by entropy at rollout.temperature 0 (greedy sampling)
    rollout: {temperature: 0}
    train: {loss: {entropy: 0.1}}
    > run.yaml: train.loss.entropy has no effect at rollout.temperature 0 (greedy sampling)
    train: {loss: {policy: sequence_clip}}
    > run.yaml: train.loss.policy sequence_clip has one ratio per row, but train.loss.mean_over token gives
    > long rows more weight: use mean_over session
    train: {loss: {policy: plain, ratio_to: step_start}}
    > run.yaml: train.loss.policy plain has no ratio: leave train.loss.ratio_to out
    train: {loss: {policy: m2po, ratio_to: step_start}}
    > run.yaml: train.loss.policy m2po computes its bounds from the ratio to the policy that sampled: leave
    > train.loss.ratio_to out
    train: {loss: {correction: {}}}
    > run.yaml: train.loss.ratio_to behaviour already corrects for lag, so train.loss.correction would correct
    > for lag twice: set train.loss.ratio_to step_start, or leave train.loss.correction out
    train: {loss: {policy: {beyond: dual, cap: null}}}
    > run.yaml: train.loss.policy.beyond dual needs train.loss.policy.cap
    train: {loss: {policy: {beyond: dual, cap: 1.2}}}
    > run.yaml: train.loss.policy.cap (1.2) must exceed 1 + `high` (0.28) with `beyond: dual`
    train: {weights: [fresh]}
    > run.yaml: train.weights fresh has no effect: the lag of this run's tokens is at most 1 (rollout.max_lag,
    > or 0 without overlap)
    train: {weights: [overlong, overlong]}
    > run.yaml: train.weights lists the same kind twice
    train: {loss: {kl: {coefficient: 1.0, renew_every: 40}}}
    > run.yaml: train.loss.kl.renew_every must be less than train.iterations (40): leave renew_every out to
    > keep the policy at the start as the reference
    train: {advantage: gae}
    > run.yaml: train.advantage gae needs the values of a critic: add train.critic, as `critic: {}`
    train: {critic: {}}
    > run.yaml: train.critic has no effect with train.advantage group: use train.advantage gae, or leave
    > train.critic out
    train: {weights: [gated]}
    > run.yaml: train.weights gated needs the values of a critic: use train.advantage gae
    train: {advantage: pair}
    > run.yaml: train.advantage pair needs train.loss.policy plain
    train: {advantage: pair, loss: {policy: plain}, minibatches: 2}
    > run.yaml: train.advantage pair is computed before the first optimiser step, so train.minibatches must be
    > 1
    rollout: {gate: {kind: mixed, least: 5}}
    > run.yaml: rollout.gate mixed needs 5 right and 5 wrong sessions, but a group has 8 (rollout.group_size):
    > lower `least`
    environment: {group_reward: 'a:b'}
    rollout: {spare_sessions: 1}
    > run.yaml: environment.group_reward waits for the answers of all sessions of a group, but
    > rollout.spare_sessions stops the slowest sessions: leave one of the two out
    environment: {group_reward: 'a:b'}
    rollout: {outside_groups: 1}
    > run.yaml: environment.group_reward scores the answers of the run's own agents, but the rewards of
    > rollout.outside_groups are external: leave one of the two out
    rollout: {least_sessions: 9}
    > run.yaml: rollout.least_sessions (9) must not exceed rollout.group_size (8)
    rollout: {groups_per_batch: 4, curriculum: {pool: 8}}
    > run.yaml: rollout.curriculum.pool (8) must exceed the number of groups in flight,
    > rollout.groups_per_batch (4) times 1 + lag (1), because two groups never sample a task at the same time
    rollout:
      curriculum: {stages: [{shares: {calculator: 1}, until: 40}, {shares: {calculator: 1}}]}
    > run.yaml: rollout.curriculum.stages has a stage that begins after the last iteration (train.iterations
    > 40): lower the `until` of the previous stage, or leave this stage out
    rollout:
      curriculum: {stages: [{shares: {calculator: 1}}]}
    environment: {tasks: 'mine:tasks'}
    > run.yaml: rollout.curriculum.stages are shares of an environment's parts, but environment.tasks, a
    > function of your own, has no parts: leave one of the two out
    rollout: {outside_groups: 32, curriculum: {pool: 100}}
    > run.yaml: rollout.curriculum chooses tasks of the environment, but all groups are external
    > (rollout.outside_groups): leave one of the two out
    rollout: {curriculum: {pool: 100, sizes: {fewer: 8}}}
    > run.yaml: rollout.curriculum.sizes.fewer (8) must be below rollout.group_size (8)
    rollout: {curriculum: {pool: 100, sizes: {fewer: 1}}}
    > run.yaml: train.advantage group compares the sessions of a group, but rollout.curriculum.sizes.fewer is
    > 1: raise rollout.curriculum.sizes.fewer, or use train.advantage whitened
    rollout: {gate: {kind: mixed, least: 2}, curriculum: {pool: 100, sizes: {fewer: 3}}}
    > run.yaml: rollout.gate mixed drops every group of 3 sessions: raise rollout.curriculum.sizes.fewer
    train: {select: {kind: extremes, keep: 8}}
    > run.yaml: train.select.keep (8) must be below rollout.group_size (8): lower train.select.keep, or leave
    > train.select out
    train: {select: {kind: extremes, keep: 4}, advantage: gae, critic: {}}
    > run.yaml: train.advantage gae compares sessions of the whole batch, but train.select extremes keeps the
    > best and the worst sessions of each group: use train.advantage group, or leave train.select out
    train: {select: {kind: extremes, keep: 4}, advantage: whitened}
    > run.yaml: train.advantage whitened compares sessions of the whole batch, but train.select extremes keeps
    > the best and the worst sessions of each group: use train.advantage group, or leave train.select out
    train: {select: {kind: extremes, keep: 4}, advantage: role_baseline}
    > run.yaml: train.advantage role_baseline compares sessions of the whole batch, but train.select extremes
    > keeps the best and the worst sessions of each group: use train.advantage group, or leave train.select
    > out
    train: {loss: {mean_over: constant}}
    ---
    train: {loss: {session_tokens: 10}}
    > run.yaml line 1: train.loss: `mean_over: constant` and session_tokens need each other: set both or
    > neither
    rollout: {curriculum: {order: draw}}
    ---
    rollout: {curriculum: {solved: 0.5}}
    ---
    rollout: {curriculum: {unsolved: 0.5}}
    ---
    rollout: {curriculum: {sizes: {fewer: 4}}}
    > run.yaml: rollout.curriculum with `order: draw`, `sizes`, or `solved` or `unsolved` below 1 uses the
    > earlier results of tasks, but without `pool` no task is sampled twice: set rollout.curriculum.pool
    rollout:
      curriculum: {stages: [{shares: {calculator: 1}, until: 4}]}
    ---
    rollout:
      curriculum: {stages: [{shares: {calculator: 1}}, {shares: {calculator: 1}}]}
    ---
    rollout:
      curriculum:
        stages: [{shares: {a: 1}, until: 8}, {shares: {a: 1}, until: 8}, {shares: {a: 1}}]
    ---
    rollout:
      curriculum:
        stages: [{shares: {a: 1}, until: 8}, {shares: {a: 1}, until: 4}, {shares: {a: 1}}]
    ---
    rollout:
      curriculum: {stages: [{shares: {calculator: 1}, until: 4}, {shares: {calculator: 1}, until: 8}]}
    > run.yaml: rollout.curriculum.stages: each stage except the last needs an `until` above the `until` of
    > the previous stage; the last stage must not have an `until`
    rollout: {curriculum: {pool: 100, explore: 0.2}}
    ---
    rollout: {curriculum: {pool: 100, utility: hard}}
    > run.yaml: rollout.curriculum.explore and rollout.curriculum.utility have no effect with `order: epochs`:
    > use `order: draw`, or leave `explore` and `utility` out
    pipeline: disaggregated
    rollout: {overlap: true}
    > run.yaml: pipeline disaggregated requires rollout.overlap: false; leave one of the two out
    pipeline: async
    rollout: {overlap: false}
    > run.yaml: pipeline async requires rollout.overlap: true; leave one of the two out
    pipeline: multiplexed
    rollout: {overlap: false}
    > run.yaml: pipeline multiplexed requires rollout.overlap: true; leave one of the two out
    train: {backend: megatron, tensor_parallel: 2, pipeline_parallel: 2, workers: 6}
    > run.yaml: train.workers (6) must be a multiple of train.tensor_parallel (2) times
    > train.pipeline_parallel (2)
    train: {backend: megatron, tensor_parallel: 2, pipeline_parallel: 2, workers: 8, min_workers: 6}
    > run.yaml: train.min_workers (6) must be a multiple of train.tensor_parallel (2) times
    > train.pipeline_parallel (2)
""")
def test_settings_that_contradict_each_other_are_refused(refusal: Refusal, tmp_path: Path) -> None:
    refusal.check(tmp_path)
