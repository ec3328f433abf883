"""What TRL and verl make of the inputs of tests/sf_core/recipes/references.py; runs in their environment.

python formulas.py INPUTS.npz RESULT.npz
"""

from __future__ import annotations

import sys
import types
from collections import defaultdict
from importlib.metadata import version
from typing import Any

import numpy as np
import torch


def main(given: str, made: str) -> None:
    arrays = dict(np.load(given))
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    found = {f"inputs/{name}": array for name, array in arrays.items()}
    for name in ("trl", "verl", "torch"):
        found[f"version/{name}"] = np.array(version(name))
    for name, (value, gradient) in {**_verl(tensors), **_trl(tensors)}.items():
        found[f"{name}/value"] = value
        found[f"{name}/gradient"] = gradient
    np.savez(made, **found)


def _slope(value: torch.Tensor, new: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    (gradient,) = torch.autograd.grad(value.sum(), new)
    return value.detach().numpy(), gradient.numpy()


def _verl(given: dict[str, torch.Tensor]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    import verl.trainer.ppo.core_algos as algos  # type: ignore[import-not-found]
    from verl.workers.config import ActorConfig  # type: ignore[import-not-found]

    mask = given["mask"].double()
    old = given["old"]
    advantages = given["advantages"].unsqueeze(1).expand_as(mask)

    def settings(**values: Any) -> Any:
        made = object.__new__(ActorConfig)
        defaults = {"clip_ratio": 0.2, "clip_ratio_c": 3.0, "global_batch_info": {}}
        for name, value in (defaults | values).items():
            object.__setattr__(made, name, value)
        return made

    def loss(function: Any, mode: str, low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
        new = given["new"].clone().requires_grad_()
        config = settings(clip_ratio_low=low, clip_ratio_high=high)
        value, _ = function(old, new, advantages, mask, loss_agg_mode=mode, config=config)
        return _slope(value, new)

    found = {
        f"verl clip {mode}": loss(algos.compute_policy_loss_vanilla, mode, 0.2, 0.28)
        for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    }
    found["verl gspo"] = loss(algos.compute_policy_loss_gspo, "seq-mean-token-mean", 3e-4, 4e-4)
    found["verl cispo"] = loss(algos.compute_policy_loss_cispo, "token-mean", 10.0, 0.2)

    # the reward stands at the last sampled token
    last = torch.where(given["mask"], torch.arange(mask.shape[1]), -1).argmax(1)
    rewards = torch.zeros_like(mask)
    rewards[torch.arange(len(mask)), last] = given["rewards"]
    groups = given["groups"].numpy()
    unscaled = {"norm_adv_by_std_in_grpo": False}
    advantage = {
        "grpo": algos.compute_grpo_outcome_advantage(rewards, mask, groups)[0],
        "dr_grpo": algos.compute_grpo_outcome_advantage(rewards, mask, groups, **unscaled)[0],
        "rloo": algos.compute_rloo_outcome_advantage(rewards, mask, groups)[0],
        "reinforce_plus_plus": algos.compute_reinforce_plus_plus_outcome_advantage(
            rewards, mask, config=types.SimpleNamespace(gamma=1.0)
        )[0],
        "reinforce_plus_plus_baseline": algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
            rewards, mask, groups
        )[0],
    }
    discounts = (torch.tensor(0.99), torch.tensor(0.95))
    advantage["gae"] = algos.compute_gae_advantage_return(rewards, given["values"], mask, *discounts)[0]
    found |= {f"verl {name}": ((value * mask).numpy(), np.empty(0)) for name, value in advantage.items()}
    for name, kind in {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}.items():
        new = given["new"].clone().requires_grad_()
        found[f"verl {name}"] = _slope(algos.kl_penalty_forward(new, given["reference"], kind), new)
    return found


def _trl(given: dict[str, torch.Tensor]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    from trl import GRPOTrainer

    mask = given["mask"].double()

    def loss(kind: str, beta: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
        new = given["new"].clone().requires_grad_()
        # its method, without the trainer that would have a model, data and a device
        stub = types.SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *a, **k: (new, torch.zeros_like(new), None),
            aux_loss_enabled=False,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            importance_sampling_level="token",
            beta=beta,
            loss_type=kind,
            epsilon_low=0.2,
            epsilon_high=0.28,
            args=types.SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
            use_vllm=False,
            vllm_importance_sampling_correction=False,
            current_gradient_accumulation_steps=1,
            max_completion_length=mask.shape[1],
            _entropy_bonus_enabled=False,
            accelerator=types.SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, **k: x),
            _metrics={"train": defaultdict(list)},
            model=types.SimpleNamespace(training=True),
        )
        ones = torch.ones(len(mask), 1)
        batch = {
            "prompt_ids": ones.long(),
            "prompt_mask": ones,
            "completion_ids": torch.zeros_like(mask).long(),
            "completion_mask": mask,
            "advantages": given["advantages"],
            "old_per_token_logps": given["old"],
            "num_items_in_batch": mask.sum(),
            "ref_per_token_logps": given["reference"],
        }
        return _slope(GRPOTrainer._compute_loss(stub, None, batch), new)

    found = {f"trl {kind}": loss(kind) for kind in ("dapo", "grpo", "dr_grpo")}
    return found | {f"trl {kind}, kl": loss(kind, 0.1) for kind in ("dapo", "grpo")}


if __name__ == "__main__":
    main(*sys.argv[1:])
