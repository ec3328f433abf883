"""Settings with which a run could not start from its policy, or would train nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.refusals import Refusal, refuses


@refuses("""
    engine: {context_length: 4096}
    > engine.context_length (4096) must not exceed the 2048 positions of the built-in policy
    train: {backend: emulated}
    > train.backend emulated computes no weights, but engine.kind torch needs weights; leave train.backend
    > out, or choose engine.kind emulated
    policy: {model: Qwen/Qwen3-0.6B}
    > policy.model: Qwen/Qwen3-0.6B is not a folder here; to use a model of that name on the Hugging Face hub,
    > run `hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B` and set policy.model=Qwen3-0.6B
    policy: {model: /nowhere}
    > policy.model: /nowhere does not exist; `sf model smollm2` downloads a small model named smollm2
    train: {backend: megatron, workers: 4, tensor_parallel: 4}
    > train.tensor_parallel (4) must divide the policy's num_key_value_heads, which is 2
    environment: {agent: 'nowhere:agent'}
    > environment.agent: nowhere:agent: cannot import nowhere: ModuleNotFoundError: No module named 'nowhere'
    environment: {agent: {command: [nobody]}}
    > environment.agent: the program 'nobody' does not exist on this host, or cannot be executed
    environment: {reward: 'json:score'}
    > environment.reward: json:score: module json has no score
    environment: {group_reward: 'json:vote'}
    > environment.group_reward: json:vote: module json has no vote
    policy: {model: model, adapter: nowhere}
    train: {lora: {}}
    > policy.adapter: nowhere does not contain an adapter: adapter_config.json is missing
""")
def test_what_is_not_there_or_cannot_be_used_is_refused(
    refusal: Refusal, small_policy: str, tmp_path: Path
) -> None:
    (tmp_path / "model").symlink_to(small_policy)
    refusal.check(tmp_path)


@refuses("""
    train: {loss: {kl: {coefficient: 0.1, estimator: k1}}}
    > train.loss.kl.estimator k1 with `place: loss` has a mean gradient of 0, so the penalty keeps the policy
    > nowhere: use estimator k2, whose gradient is that of the divergence, or set `place: reward`
    train: {loss: {kl: {coefficient: 0.1, renew_every: 1}}}
    ---
    train: {loss: {kl: {coefficient: 0.1, renew_every: 1, place: reward}}}
    > train.loss.kl.renew_every 1 makes the policy at the start of each train step its own reference, so the
    > penalty is 0: raise train.loss.kl.renew_every, or leave train.loss.kl out
    train: {advantage: whitened}
    rollout: {group_size: 1, groups_per_batch: 1}
    > train.advantage whitened compares the sessions of a batch, but rollout.groups_per_batch and
    > rollout.group_size are 1, so all advantages are 0: raise one of them
    train: {loss: {entropy: 0.1}}
    rollout: {top_k: 1}
    ---
    train: {weights: [surprising]}
    rollout: {top_p: 1.0e-9}
    > train.loss.entropy and the train.weights that go by entropy have no effect if the engine samples the
    > most likely token only: raise rollout.top_k or rollout.top_p, or leave them out
""")
def test_settings_without_effect_are_refused(refusal: Refusal, tmp_path: Path) -> None:
    refusal.check(tmp_path)


@refuses("""
    policy: {adapter: /x}
    > policy.adapter needs `train.lora`: add `lora: {}` to the section train, or leave policy.adapter out
    train: {lora: {}, backend: megatron}
    > train.lora: only train.backend torch trains an adapter, not megatron; leave one of the two out
    train: {lora: {}}
    engine: {kind: emulated}
    > train.lora: only train.backend torch trains an adapter, not emulated; leave one of the two out
    train: {lora: {}, critic: {}, advantage: {kind: gae}}
    > train.lora trains only the adapter's factors, but train.critic is a whole network: leave one of the two
    > out
    train: {lora: {}}
    engine: {kind: vllm, kv_on_update: keep}
    > engine.kv_on_update: keep cannot be combined with train.lora and engine.kind: vllm, which keeps a
    > separate KV cache per adapter version: leave engine.kv_on_update out
    train: {lora: {}}
    engine: {kind: vllm}
    pipeline: colocated
    > pipeline colocated lends trainers to rollout, but with train.lora a trainer cannot be lent to
    > engine.kind vllm: use pipeline async, or engine.kind torch
    train: {lora: {}}
    engine: {kind: vllm}
    pipeline: multiplexed
    > pipeline multiplexed lends trainers to rollout, but with train.lora a trainer cannot be lent to
    > engine.kind vllm: use pipeline async, or engine.kind torch
    train: {lora: {targets: [q_proj, lm_head]}}
    > train.lora: the target lm_head is not a linear layer of the model's blocks; these layers are down_proj,
    > gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj
    train: {lora: {targets: [embed_tokens]}}
    > train.lora: the target embed_tokens is not a linear layer of the model's blocks; these layers are
    > down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj
    train: {lora: {targets: [query]}}
    > train.lora: the target query is not a linear layer of the model's blocks; these layers are down_proj,
    > gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj
    train: {lora: {rank: 0}}
    > run.yaml line 1: train.lora.rank: input should be greater than or equal to 1, got 0
    train: {lora: {rank: 513}}
    > run.yaml line 1: train.lora.rank: input should be less than or equal to 512, got 513
""")
def test_settings_that_do_not_go_with_an_adapter_are_refused(refusal: Refusal, tmp_path: Path) -> None:
    refusal.check(tmp_path)


@refuses("""
    engine: {kind: torch}
    policy: {sees: true}
    > engine.kind torch does not support images, but the policy, a qwen2_5_vl, sees images: use
    > engine.kind vllm
    engine: {kind: emulated}
    policy: {sees: true}
    > engine.kind emulated does not support images, but the policy, a qwen2_5_vl, sees images: use
    > engine.kind vllm
    engine: {kind: vllm}
    policy: {sees: true}
    train: {backend: megatron}
    > train.backend megatron trains llama, qwen2, qwen3, and the policy's model_type is qwen2_5_vl: use
    > train.backend torch
    engine: {kind: vllm}
    rollout: {max_picture_tokens: 64}
    > rollout.max_picture_tokens (64) applies only to policies that see images, but this policy, a qwen3,
    > does not see images: leave rollout.max_picture_tokens out
    engine: {kind: vllm}
    policy: {model: sees}
    train: {teacher: {model: model}}
    > train.teacher.model: model does not see images, but the policy does: use a teacher that sees images
    policy: {model: sees}
    > engine.kind torch does not support images, but the policy, a qwen2_5_vl, sees images: use
    > engine.kind vllm
    engine: {kind: vllm}
    policy: {model: model, sees: true}
    > policy.sees applies only to the built-in policy: leave policy.sees out with policy.model
    engine: {kind: vllm}
    policy: {model: sees}
    rollout: {max_picture_tokens: 3}
    > rollout.max_picture_tokens is 3, but the policy's processor uses at least 4 tokens per image
""")
def test_settings_with_which_a_policy_is_shown_nothing_are_refused(
    refusal: Refusal,
    small_multimodal_policy: str,
    small_policy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # which vLLM is here is the matter of other tests
    monkeypatch.setenv("SF_VLLM_PYTHON", "/nowhere/python")
    (tmp_path / "sees").symlink_to(small_multimodal_policy)
    (tmp_path / "model").symlink_to(small_policy)
    refusal.check(tmp_path)


@refuses("""
    cluster: {workers: {r0: {tags: [rollout]}, x: {tags: [agent]}, c0: {tags: [cpu]}}}
    > no worker has the tag 'train'; workers: r0 {rollout}, x {agent}, c0 {cpu}
    cluster: {workers: {t0: {tags: [rollout, train]}, x: {tags: [agent, cpu]}}}
    > worker 'x' has both tags `agent` and `cpu`; agent work would starve the filter, so give the tags to
    > different workers
    cluster: {workers: {t0: {tags: [rollout, train]}, a0: {tags: [agent]}, x: {tags: [reward, cpu]}}}
    > worker 'x' has both tags `reward` and `cpu`; reward work would starve the filter, so give the tags to
    > different workers
    cluster: {workers: {r0: {tags: [rollout]}, t0: {tags: [train, agent]}, c0: {tags: [cpu]}}}
    > no worker is left for agents: t0 trains, and agents would delay training; workers: r0 {rollout}, t0
    > {agent, train}, c0 {cpu}
    rollout: {groups_per_batch: 4, outside_groups: 3}
    cluster: {workers: {r0: {tags: [rollout]}, t0: {tags: [rollout, train]}, c0: {tags: [cpu]}}}
    > no worker has the tag 'agent'; workers: r0 {rollout}, t0 {rollout, train}, c0 {cpu}
    pipeline: colocated
    cluster:
      workers: {r0: {tags: [rollout]}, t0: {tags: [rollout, train]}, a0: {tags: [agent]}, c0: {tags: [cpu]}}
    > with pipeline colocated, a worker tagged rollout or train needs both of these tags; r0 has {rollout}
    pipeline: colocated
    cluster:
      workers: {d0: {tags: [rollout, train]}, d1: {tags: [rollout, train]},
        a0: {tags: [agent]}, c0: {tags: [cpu]}}
    > pipeline colocated trains on every worker tagged rollout and train: set train.workers to 2, not 1;
    > workers: d0 {rollout, train}, d1 {rollout, train}, a0 {agent}, c0 {cpu}
    pipeline: disaggregated
    cluster: {workers: {t0: {tags: [rollout, train]}, a0: {tags: [agent]}, c0: {tags: [cpu]}}}
    > pipeline disaggregated needs a worker tagged rollout in addition to the trainers t0; workers: t0
    > {rollout, train}, a0 {agent}, c0 {cpu}
    pipeline: multiplexed
    train: {workers: 2}
    cluster:
      workers: {t0: {tags: [rollout, train]}, t1: {tags: [rollout, train]},
        a0: {tags: [agent]}, c0: {tags: [cpu]}}
    > pipeline multiplexed needs a worker tagged rollout in addition to the trainers t0, t1; workers: t0
    > {rollout, train}, t1 {rollout, train}, a0 {agent}, c0 {cpu}
    pipeline: multiplexed
    cluster: {workers: {r0: {tags: [rollout]}, t0: {tags: [train]}, a0: {tags: [agent]}, c0: {tags: [cpu]}}}
    > no worker is tagged rollout and train; workers: r0 {rollout}, t0 {train}, a0 {agent}, c0 {cpu}
    train: {workers: 2}
    cluster: {workers: {r0: {tags: [rollout]}, t0: {tags: [train]}, a0: {tags: [agent]}, c0: {tags: [cpu]}}}
    > train.workers is 2, but the number of workers tagged train is 1; workers: r0 {rollout}, t0 {train}, a0
    > {agent}, c0 {cpu}
    engine: {kind: vllm}
    train: {lora: {}}
    cluster: {workers: {t0: {tags: [rollout, train]}, a0: {tags: [agent]}, c0: {tags: [cpu]}}}
    > a trainer that is not lent (engine.kind vllm with train.lora) needs a worker tagged rollout in addition
    > to the trainers t0; workers: t0 {rollout, train}, a0 {agent}, c0 {cpu}
""")
def test_workers_that_cannot_run_a_pipeline_are_refused_with_what_is_missing(
    refusal: Refusal, tmp_path: Path
) -> None:
    refusal.check(tmp_path)
