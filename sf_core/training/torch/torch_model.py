"""The torch backend's models, trained or frozen: networks whose parameters FSDP2 shards over the ranks.

One rank holds a plain network, and the weights of a step ready in the dtype of computing. If the lean decoder
does not run it, in another dtype than float32, one rank is a group of one (docs/decisions/032, 047).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from sf_core.config.run_config import DtypeName
from sf_core.engines.torch.transformers_model import unmap_params
from sf_core.training.packing.trie import Microbatch
from sf_core.training.torch.network import Network, Outputs
from sf_core.training.torch.ranks import Ranks, exchange
from sf_core.training.torch.trained_model import AdamSettings, Targets, TokenLoss, are_finite
from sf_core.training.vision_tower import VisionTower
from storage.tensors.checkpoints import EXP_AVG, EXP_AVG_SQ, MASTER, Slice, Slices


class _NetworkModel:
    """A network that the ranks of a step hold together."""

    measures = True
    _dtype_of_copies: torch.dtype | None = None
    """Dtype in which weights are held ready for the passes of a call."""

    def __init__(self, network: Network, ranks: Ranks) -> None:
        self.num_shares = ranks.size
        self.share = ranks.rank
        self.reads_tries = network.is_lean
        self.network = network
        self._model = network.model
        self.device = self._model.device

    def _fuse_or_shard(self, ranks: Ranks, dtype: torch.dtype, *, is_frozen: bool) -> bool:
        """Fuse or shard the weights, for passes in this dtype. Returns whether they stay as they are on one
        rank, for the lean decoder. `is_frozen`: none of them is trained but factors."""
        is_whole = ranks.size == 1 and self.network.is_lean
        if is_whole and is_frozen:
            self.network.fuse_frozen()
        elif not is_whole and (ranks.size > 1 or dtype != torch.float32):
            _shard(self.network, ranks, dtype)
        return is_whole and not is_frozen

    @torch.no_grad()
    def forward(self, microbatches: Sequence[Microbatch], loss: TokenLoss) -> None:
        if not microbatches:
            return
        with exchange(), self._ready():
            for microbatch in microbatches:
                on_device = microbatch.to(self.device)
                loss(on_device, *self.network.scores(on_device))
        if isinstance(self._model, FSDPModule):
            # the outermost shard group stays whole after a forward pass, and would miss the next update
            self._model.reshard()

    @torch.no_grad()
    def predict(self, microbatch: Microbatch) -> Outputs:
        return self.network.outputs(microbatch)

    def _ready(self) -> AbstractContextManager[None]:
        return (
            nullcontext()
            if self._dtype_of_copies is None
            else self.network.computing_in(self._dtype_of_copies)
        )

    def rest(self) -> None:
        self._move(torch.device("cpu"))

    def wake(self) -> None:
        self._move(self.device)

    def _move(self, device: torch.device) -> None:
        if self.device.type != "cpu":
            self._model.to(device)
            if self.network.tower is not None:
                self.network.tower.move(device)
            torch.cuda.empty_cache()


class FrozenModel(_NetworkModel):
    """A model that is not trained, of a Hugging Face folder or with an adapter beside it."""

    def __init__(
        self,
        model_dir: str,
        ranks: Ranks,
        *,
        device: str = "cpu",
        dtype: DtypeName | Literal["auto"] = "float32",
        adapter: str | None = None,
        tower: VisionTower | None = None,
    ) -> None:
        """`dtype`: that of weights and computing; auto: the one that the folder has. `tower`: what shows
        images to it."""
        kind = dtype if dtype == "auto" else getattr(torch, dtype)
        super().__init__(Network(model_dir, device, adapter=adapter, dtype=kind, tower=tower), ranks)
        if adapter is None:
            self._model.requires_grad_(False)
        self._fuse_or_shard(ranks, self._model.dtype, is_frozen=True)


class AdapterVersionModel:
    """The trained model with other factors of its adapter, for as long as each pass takes."""

    def __init__(self, model: TorchModel, factors: Mapping[str, torch.Tensor]) -> None:
        self._model = model
        self._factors = factors
        self.num_shares = model.num_shares
        self.share = model.share
        self.measures = model.measures
        self.reads_tries = model.reads_tries

    def forward(self, microbatches: Sequence[Microbatch], loss: TokenLoss) -> None:
        with self._model.replaced_weights(self._factors):
            self._model.forward(microbatches, loss)

    def predict(self, microbatch: Microbatch) -> Outputs:
        with self._model.replaced_weights(self._factors):
            return self._model.predict(microbatch)

    def rest(self) -> None:
        """The weights rest with the trained model."""

    def wake(self) -> None:
        """The weights wake with the trained model."""


class TorchModel(_NetworkModel):
    """The TrainedModel of a Hugging Face folder, or of an adapter beside it."""

    def __init__(
        self,
        model_dir: str,
        ranks: Ranks,
        *,
        device: str = "cpu",
        dtype: DtypeName = "float32",
        recompute: bool = False,
        values: bool = False,
        adapter: str | None = None,
        tower: VisionTower | None = None,
    ) -> None:
        """`dtype`: that of computing; what is trained and its moments are in float32. `values`: it gives
        values for log-probs. `adapter`: folder of the adapter that is trained. `tower`: what shows images
        to it."""
        self._dtype: torch.dtype = getattr(torch, dtype)
        kind = torch.float32 if adapter is None else self._dtype
        choices: dict[str, Any] = {"recompute": recompute, "values": values, "adapter": adapter}
        super().__init__(Network(model_dir, device, dtype=kind, tower=tower, **choices), ranks)
        self._stored_names: dict[str, str | None] | None = None
        if adapter is None:
            parameters = {id(parameter): name for name, parameter in self._model.named_parameters()}
            self._stored_names = {
                name: parameters.get(id(tensor))
                for name, tensor in self._model.state_dict(keep_vars=True).items()
            }
        if self._dtype == torch.bfloat16:
            dither(self.network.trained.values())
        is_held = self._fuse_or_shard(ranks, self._dtype, is_frozen=adapter is not None)
        self._dtype_of_copies = self._dtype if is_held else None
        self._parameters = self.network.trained
        # learning rate, betas and weight decay are set in every step
        self._optimizer = torch.optim.AdamW(self._parameters.values(), fused=True)

    def forward_backward(
        self, microbatches: Sequence[Microbatch], loss: TokenLoss, targets: Targets | None = None
    ) -> None:
        with exchange(), self._ready():
            for microbatch in microbatches:
                on_device = microbatch.to(self.device)
                target = None if targets is None else targets(on_device)
                loss(on_device, *self.network.scores(on_device, target)).backward()

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
                group["lr"] = settings.learning_rate
                group["betas"] = settings.betas
                group["weight_decay"] = settings.weight_decay
            self._optimizer.step()
        self._optimizer.zero_grad()
        return grad_norm

    def is_finite(self) -> bool:
        return are_finite([_local_part(parameter) for parameter in self._parameters.values()])

    @property
    def slices_by_name(self) -> dict[str, Slice]:
        return {
            name: Slice.rows(tuple(p.shape), self.share, self.num_shares)
            for name, p in self._parameters.items()
        }

    def slices(self, parts: Sequence[str]) -> Slices:
        state = self._optimizer.state
        return {
            f"{part}/{name}": (
                part_of_tensor,
                _local_part(parameter if part == MASTER else state[parameter][part]),
            )
            for part in parts
            for (name, parameter), part_of_tensor in zip(
                self._parameters.items(), self.slices_by_name.values(), strict=True
            )
            # some ranks have nothing of a small tensor
            if 0 not in part_of_tensor.size
        }

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor], optimizer_steps: int) -> None:
        for name, parameter in self._parameters.items():
            moments = {part: torch.zeros_like(parameter) for part in (EXP_AVG, EXP_AVG_SQ)}
            for part, tensor in {MASTER: parameter, **moments}.items():
                _local_part(tensor).copy_(tensors[f"{part}/{name}"])
            steps = torch.tensor(float(optimizer_steps), device=self.device)
            self._optimizer.state[parameter] = {"step": steps, **moments}

    @contextmanager
    def replaced_weights(self, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Have other whole weights, by the names of what is trained, for as long as the block runs."""
        own = {name: _local_part(parameter) for name, parameter in self._parameters.items()}
        backups = {name: tensor.clone() for name, tensor in own.items()}
        try:
            for name, part_of_tensor in self.slices_by_name.items():
                own[name].copy_(weights[name][part_of_tensor.box])
            yield
        finally:
            for name, tensor in backups.items():
                own[name].copy_(tensor)

    def _move(self, device: torch.device) -> None:
        if self.device.type != "cpu":
            for state in self._optimizer.state.values():
                state.update({part: state[part].to(device) for part in (EXP_AVG, EXP_AVG_SQ)})
        super()._move(device)

    def as_stored(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self._stored_names is None:
            return dict(weights)
        buffers = dict(self._model.named_buffers())
        state = {
            name: buffers[name] if own is None else weights[own] for name, own in self._stored_names.items()
        }
        return unmap_params(self._model, state)


@torch.no_grad()
def dither(parameters: Iterable[torch.Tensor]) -> None:
    """Move float32 weights that are exact in bfloat16 to random places among those that round to the same.

    Models are stored in bfloat16, so all of their weights start in the middle between two roundings, and what
    is computed with would not change until a weight has gone half of the way to the next: ten steps, or
    hundreds. From random places as many weights change as the step is long."""
    random = torch.Generator().manual_seed(0)
    for weights in parameters:
        bits = weights.view(torch.int32)
        noise = torch.randint(-_MAX_DITHER, _MAX_DITHER + 1, bits.shape, generator=random, dtype=torch.int32)
        # next to 0 the bits of the negative begin; those of infinity and beyond are not numbers
        is_exact = ((bits & 0xFFFF) == 0) & (weights != 0) & weights.isfinite()
        bits += noise.to(bits.device) * is_exact


_MAX_DITHER = (1 << 15) - 1
"""Bits of a float32 by which it may differ from a bfloat16 that it rounds to."""


def _shard(network: Network, ranks: Ranks, dtype: torch.dtype) -> None:
    """Cut the parameters of each block, and the rest together, along their first dimension."""
    mesh = ranks.mesh(network.model.device.type)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (*network.blocks, network.model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
        # by default gradients are averaged, in a way that gloo does not know
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor that may be sharded."""
    local: torch.Tensor = getattr(tensor, "to_local", lambda: tensor)()
    return local.detach()
