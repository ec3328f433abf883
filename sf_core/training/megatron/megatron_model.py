"""The Megatron backend's model: GPTModel with Megatron's pipeline schedule, data-parallel wrapper and
distributed optimizer, under Hugging Face's names.

Data-parallel ranks hold the same weights, and each a part of the master weights and of Adam's moments: a
range of the flat memory of all parameters, which is no box of any tensor. So each parameter is put together
on a data-parallel rank before it is stored, on one after the other in turn; who loads it takes its own range.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import DistributedOptimizer, OptimizerConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from safetensors import safe_open
from transformers import AutoConfig

from sf_core.config import TrainConfig
from sf_core.config.run_config import DtypeName
from sf_core.models.decoder import decoder_spec
from sf_core.training.megatron.limits import check_shape
from sf_core.training.megatron.mapping import VALUE_HEAD, ParameterParts, make_groups
from sf_core.training.megatron.network import MegatronNetwork
from sf_core.training.megatron.on_cpu import cuda_means_cpu
from sf_core.training.packing.trie import Microbatch
from sf_core.training.torch.ranks import Ranks, exchange
from sf_core.training.torch.trained_model import AdamSettings, Targets, TokenLoss, are_finite
from storage.tensors.checkpoints import EXP_AVG, EXP_AVG_SQ, MASTER, Slice, Slices


@dataclass(frozen=True, slots=True)
class _Range:
    """What this rank's optimizer has of a parameter."""

    master: torch.Tensor
    """[end - begin] in float32."""
    begin: int
    end: int


class MegatronModel:
    """The TrainedModel of a Hugging Face folder."""

    def __init__(
        self,
        model_dir: str,
        ranks: Ranks,
        config: TrainConfig,
        *,
        device: str = "cpu",
        dtype: DtypeName = "float32",
        values: bool = False,
    ) -> None:
        """`dtype`: that of computing; master weights and moments are in float32. `values`: it gives values
        for log-probs. Raises ValueError, one sentence, if this backend cannot train the model so."""
        shape = AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
        check_shape(shape.to_dict(), config)
        spec = decoder_spec(shape, max_length=1 << 30)
        # a single rank repeats what several have trained
        tensor, pipeline = (config.tensor_parallel, config.pipeline_parallel) if ranks.size > 1 else (1, 1)
        if spec is None or spec.rope_scaling != 1:
            raise ValueError(
                f"train.backend megatron does not support the rope_parameters of {model_dir}: use "
                "train.backend torch"
            )
        self.device = torch.device(device)
        with self._exchange():
            groups = self._groups = make_groups(ranks, self.device, tensor, pipeline)
            self.reads_tries = True
            self.num_shares = groups.dp.size()
            self.share = groups.dp.rank()
            self.measures = groups.pp.rank() == pipeline - 1 and groups.tp.rank() == 0
            network = MegatronNetwork(
                shape, spec, groups, getattr(torch, dtype), recompute=config.recompute, values=values
            )
            network.to(self.device)
            self._model = DistributedDataParallel(
                network.config,
                DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
                network,
                pg_collection=groups,
            )
            self._optimizer = _optimizer(self._model, groups, dtype)
            self._run = get_forward_backward_func(pipeline, None)
            self._between_stages = P2PCommunicator(groups.pp, network.config)
        offset = get_transformer_layer_offset(network.config, pp_rank=groups.pp.rank())
        pieces = ParameterParts(
            shape.vocab_size,
            spec.head_dim,
            spec.num_heads // spec.num_kv_heads,
            shape.tie_word_embeddings,
            groups.tp.rank(),
            tensor,
            offset,
        )
        self._pieces = {p: pieces.of(name, tuple(p.shape)) for name, p in network.named_parameters()}
        self._ranges = dict(_ranges(self._optimizer))
        stored = {name: target for name, target in self.slices_by_name.items() if name != VALUE_HEAD}
        new = {
            name: torch.zeros(target.size)
            for name, target in self.slices_by_name.items()
            if name == VALUE_HEAD
        }
        self._load(MASTER, _read_slices(model_dir, stored) | new)

    def forward_backward(
        self, microbatches: Sequence[Microbatch], loss: TokenLoss, targets: Targets | None = None
    ) -> None:
        assert targets is None, "configurations with train.teacher and this backend are refused"
        self._pass(microbatches, loss, forward_only=False)

    @torch.no_grad()
    def forward(self, microbatches: Sequence[Microbatch], loss: TokenLoss) -> None:
        self._pass(microbatches, loss, forward_only=True)

    def _pass(self, microbatches: Sequence[Microbatch], loss: TokenLoss, *, forward_only: bool) -> None:
        def step(following: Iterator[Microbatch], model: Any) -> tuple[Any, Any]:
            microbatch = next(following).to(self.device)

            def measure(scores: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, dict]:
                # a loss with a number of tokens is left as it is
                num_tokens = torch.ones((), dtype=torch.int)
                return loss(microbatch, *scores), num_tokens, {}

            return model(microbatch), measure

        # the schedule takes at least one
        if microbatches:
            with self._exchange():
                self._run(
                    forward_step_func=step,
                    data_iterator=iter(microbatches),
                    model=self._model,
                    num_microbatches=len(microbatches),
                    # those of each microbatch are exchanged
                    seq_length=1,
                    micro_batch_size=1,
                    forward_only=forward_only,
                    p2p_communicator=self._between_stages,
                    pg_collection=self._groups,
                )

    def update(self, settings: AdamSettings) -> float:
        optimizer = self._optimizer
        with self._exchange():
            finalize_model_grads([self._model], pg_collection=self._groups)
            optimizer.prepare_grads()
            grad_norm = float(optimizer.clip_grad_norm(settings.max_grad_norm))
            if math.isfinite(grad_norm):
                for group in optimizer.param_groups:
                    group["lr"] = settings.learning_rate
                    group["betas"] = settings.betas
                    group["weight_decay"] = settings.weight_decay
                optimizer.step_with_ready_grads()
            self._model.zero_grad_buffer()
            optimizer.zero_grad()
        return grad_norm

    def is_finite(self) -> bool:
        return are_finite(self._pieces)

    @property
    def slices_by_name(self) -> dict[str, Slice]:
        return {piece.name: piece.slice_in_tensor for pieces in self._pieces.values() for piece in pieces}

    def slices(self, parts: Sequence[str]) -> Slices:
        owned = {}
        with exchange():
            for number, parameter in enumerate(self._list_stored_here()):
                for part in parts:
                    whole = self._whole(part, parameter, number % self.num_shares)
                    if whole is not None:
                        for piece in self._pieces[parameter]:
                            own = piece.of(whole).reshape(piece.slice_in_tensor.size)
                            owned[f"{part}/{piece.name}"] = piece.slice_in_tensor, own
        # a small vocabulary may leave some ranks without a row
        return {name: (target, own) for name, (target, own) in owned.items() if 0 not in target.size}

    def _list_stored_here(self) -> list[torch.Tensor]:
        """Parameters of which no other tensor-parallel rank or stage stores the same."""
        first = self._groups.tp.rank() == 0
        return [
            parameter
            for parameter, pieces in self._pieces.items()
            # a tied head is a copy of the embedding on another stage
            if (first or not pieces[0].replicated) and not getattr(parameter, "shared", False)
        ]

    @torch.no_grad()
    def _whole(self, part: str, parameter: torch.Tensor, share: int) -> torch.Tensor | None:
        """A part of a parameter, on the data-parallel rank with this share; None on the others."""
        own = self._ranges.get(parameter)
        if own is not None and self.num_shares == 1:
            return self._find_held(part, own).view(parameter.shape)
        whole = torch.zeros(parameter.numel(), device=self.device)
        if own is not None:
            whole[own.begin : own.end] = self._find_held(part, own)
        # the sum of integers of which all but one are zero keeps every bit, also the sign of a zero
        dist.reduce(whole.view(torch.int32), group=self._groups.dp, group_dst=share)
        return whole.view(parameter.shape).cpu() if share == self.share else None

    def load(self, tensors: Mapping[str, torch.Tensor], optimizer_steps: int) -> None:
        for own in self._ranges.values():
            steps = torch.tensor(float(optimizer_steps), device=self.device)
            moments = {part: torch.empty_like(own.master) for part in (EXP_AVG, EXP_AVG_SQ)}
            self._state[own.master] = {"step": steps, **moments}
        for part in (MASTER, EXP_AVG, EXP_AVG_SQ):
            self._load(part, {name: tensors[f"{part}/{name}"] for name in self.slices_by_name})

    @torch.no_grad()
    def _load(self, part: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take a part of all parameters, by name."""
        for parameter, pieces in self._pieces.items():
            # zero where the vocabulary is padded
            whole = torch.zeros(parameter.shape)
            for piece in pieces:
                target = piece.of(whole)
                target.copy_(tensors[piece.name].view_as(target))
            if part == MASTER:
                parameter.copy_(whole)
            if (own := self._ranges.get(parameter)) is not None:
                self._find_held(part, own).copy_(whole.view(-1)[own.begin : own.end])

    def _find_held(self, part: str, own: _Range) -> torch.Tensor:
        return own.master.detach() if part == MASTER else self._state[own.master][part]

    def rest(self) -> None:
        if self.device.type == "cuda":
            for buffer in self._model.buffers:
                buffer.offload_to_cpu()
            self._move(torch.device("cpu"))
            torch.cuda.empty_cache()

    def wake(self) -> None:
        if self.device.type == "cuda":
            for buffer in self._model.buffers:
                buffer.reload_from_cpu()
            self._move(self.device)

    def _move(self, device: torch.device) -> None:
        """Move what the buffers of weights and gradients do not hold."""
        for parameter, own in self._ranges.items():
            # in float32 they are the weights themselves
            if parameter.dtype != torch.float32:
                own.master.data = own.master.data.to(device)
            moments = self._state.get(own.master, {})
            moments.update({part: moments[part].to(device) for part in (EXP_AVG, EXP_AVG_SQ) if moments})

    def as_stored(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(weights)

    @property
    def _state(self) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        return self._optimizer.optimizer.state

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        as_if_on_cuda: AbstractContextManager[None] = (
            nullcontext() if self.device.type == "cuda" else cuda_means_cpu()
        )
        with exchange(), as_if_on_cuda:
            yield


def _optimizer(model: DistributedDataParallel, groups: Any, dtype: DtypeName) -> DistributedOptimizer:
    """Megatron's optimizer around torch's AdamW: that of Transformer Engine, which would be taken where it is
    installed, counts its steps elsewhere. Learning rate, betas and weight decay are set in every step."""
    optimizer = DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), fused=True),
        OptimizerConfig(bf16=dtype == "bfloat16", use_distributed_optimizer=True),
        grad_scaler=None,
        init_state_fn=None,
        model_chunks=[model],
        per_model_buffers={0: model.buffers},
        data_parallel_group=groups.dp,
        data_parallel_group_gloo=None,
        data_parallel_group_idx=groups.mp.rank(),
        distributed_optimizer_instance_id=0,
    )
    optimizer.grad_stats_parallel_group = groups.intra_dist_opt
    optimizer.tp_group = groups.tp
    return optimizer


def _ranges(optimizer: DistributedOptimizer) -> Iterator[tuple[torch.Tensor, _Range]]:
    """What this rank's optimizer has of each parameter, if it has something of it."""
    for of_dtype in optimizer.gbuf_ranges:
        for bucket in (bucket for buckets in of_dtype.values() for bucket in buckets):
            for parameter, where in bucket["param_map"].items():
                group, number = optimizer.model_param_group_index_map[parameter]
                master = optimizer.param_groups[group]["params"][number]
                yield parameter, _Range(master, where["param"].start, where["param"].end)


def _read_slices(model_dir: str, slices_by_name: Mapping[str, Slice]) -> dict[str, torch.Tensor]:
    """Slices of the tensors of a Hugging Face folder. Raises ValueError if it lacks one."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(Path(model_dir).glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in slices_by_name.keys() & opened.keys():
                tensors[name] = opened.get_slice(name)[slices_by_name[name].box].float()
    if missing := slices_by_name.keys() - tensors.keys():
        raise ValueError(f"{model_dir}: its weights lack {min(missing)}")
    return tensors
