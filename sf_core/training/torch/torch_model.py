"""The torch backend's model: a network whose parameters are sharded over the ranks by FSDP2.

One rank in float32 holds a plain network. In another dtype one rank is a group of one, so that there is one
way of computing in a dtype with weights and moments in float32 (docs/decisions/032).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from sf_core.config.run_config import DtypeName
from sf_core.engines.torch.transformers_model import saved_params
from sf_core.training.packing import Microbatch
from sf_core.training.torch.network import Network
from sf_core.training.torch.ranks import Ranks, exchange
from sf_core.training.torch.trained_model import AdamSettings, TokenLoss
from storage.tensors.checkpoints import EXP_AVG, EXP_AVG_SQ, MASTER
from storage.tensors.shards import Place, Slices


class TorchModel:
    """The TrainedModel of a Hugging Face folder."""

    measures = True

    def __init__(
        self,
        model_dir: str,
        ranks: Ranks,
        *,
        device: str = "cpu",
        dtype: DtypeName = "float32",
        recompute: bool = False,
        values: bool = False,
    ) -> None:
        """`dtype`: that of computing; weights and moments are in float32. `values`: it gives values for
        log-probs."""
        self.num_shares, self.share = ranks.size, ranks.rank
        self.network = Network(model_dir, device, recompute=recompute, values=values)
        self._model = self.network.model
        self.device = self._model.device
        parameters = {id(parameter): name for name, parameter in self._model.named_parameters()}
        self._stored_names = {
            name: parameters.get(id(tensor))
            for name, tensor in self._model.state_dict(keep_vars=True).items()
        }
        if ranks.size > 1 or dtype != "float32":
            _shard(self.network, ranks, getattr(torch, dtype))
        self._parameters = dict(self._model.named_parameters())
        # learning rate, betas and weight decay are set in every step
        self._optimizer = torch.optim.AdamW(self._parameters.values(), fused=True)

    def forward_backward(self, microbatches: Sequence[Microbatch], loss: TokenLoss) -> None:
        with exchange():
            for microbatch in microbatches:
                here = microbatch.to(self.device)
                loss(here, *self.network.scores(here)).backward()

    @torch.no_grad()
    def forward(self, microbatches: Sequence[Microbatch], loss: TokenLoss) -> None:
        with exchange():
            for microbatch in microbatches:
                here = microbatch.to(self.device)
                loss(here, *self.network.scores(here))
        if isinstance(self._model, FSDPModule):
            # the outermost shard group stays whole after a forward pass, and would miss the next update
            self._model.reshard()

    def update(self, settings: AdamSettings) -> float:
        for parameter in self._parameters.values():
            if parameter.grad is None:
                # the moments fade also where no row teaches anything
                parameter.grad = torch.zeros_like(parameter)
        with exchange():
            total = torch.nn.utils.clip_grad_norm_(self._parameters.values(), settings.max_grad_norm)
            grad_norm = float(getattr(total, "full_tensor", lambda: total)())
        if math.isfinite(grad_norm):
            for group in self._optimizer.param_groups:
                group["lr"], group["betas"] = settings.learning_rate, settings.betas
                group["weight_decay"] = settings.weight_decay
            self._optimizer.step()
        self._optimizer.zero_grad()
        return grad_norm

    def is_finite(self) -> bool:
        return all(bool(_own(p).isfinite().all()) for p in self._parameters.values())

    @property
    def places(self) -> dict[str, Place]:
        return {
            name: Place.rows(tuple(p.shape), self.share, self.num_shares)
            for name, p in self._parameters.items()
        }

    def slices(self, parts: Sequence[str]) -> Slices:
        state = self._optimizer.state
        return {
            f"{part}/{name}": (place, _own(parameter if part == MASTER else state[parameter][part]))
            for part in parts
            for (name, parameter), place in zip(self._parameters.items(), self.places.values(), strict=True)
            # some ranks have nothing of a small tensor
            if 0 not in place.size
        }

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor], optimizer_steps: int) -> None:
        for name, parameter in self._parameters.items():
            moments = {part: torch.zeros_like(parameter) for part in (EXP_AVG, EXP_AVG_SQ)}
            for part, tensor in {MASTER: parameter, **moments}.items():
                _own(tensor).copy_(tensors[f"{part}/{name}"])
            steps = torch.tensor(float(optimizer_steps), device=self.device)
            self._optimizer.state[parameter] = {"step": steps, **moments}

    def rest(self) -> None:
        self._move(torch.device("cpu"))

    def wake(self) -> None:
        self._move(self.device)

    def _move(self, device: torch.device) -> None:
        if self.device.type == "cpu":
            return
        self._model.to(device)
        for state in self._optimizer.state.values():
            state.update({part: state[part].to(device) for part in (EXP_AVG, EXP_AVG_SQ)})
        torch.cuda.empty_cache()

    def as_stored(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        buffers = dict(self._model.named_buffers())
        state = {
            name: buffers[name] if own is None else weights[own] for name, own in self._stored_names.items()
        }
        return saved_params(self._model, state)


def _shard(network: Network, ranks: Ranks, dtype: torch.dtype) -> None:
    """Cut the parameters of each block, and the rest together, along their first dimension."""
    mesh = ranks.mesh(network.model.device.type)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (*network.blocks, network.model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
        # by default gradients are averaged, in a way that gloo does not know
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor that may be sharded."""
    local: torch.Tensor = getattr(tensor, "to_local", lambda: tensor)()
    return local.detach()
