"""Mixture of experts: which experts a token goes to, and the way there and back.

Shape suffixes: B batch, S sequence, T = B S tokens, D model width, E experts, K experts of a token, R rows (one for
each expert of each token, sorted by expert), F width of an expert, G = 2 F.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from primus.config.schema import ModelSpec
from primus.frameworks.native.engine.collectives import SEQUENCE, add_up, exchange_rows, join_parts, take_part
from primus.frameworks.native.engine.experts import run_experts
from primus.frameworks.native.engine.layout import Axis, Layout
from primus.frameworks.native.engine.loss import add_loss
from primus.frameworks.native.engine.ops import choose_wide_dtype
from primus.frameworks.native.engine.placement import share
from primus.frameworks.native.router_settings import RouterSettings
from primus.models.counts import expert_ffn_size

SMALLEST_SUM = 1e-20
"""Added to a sum of scores before it divides them, as in DeepSeek-V3's and Megatron-LM's routers."""


class RowPlan(NamedTuple):
    """Where the rows of experts come from, and where the results of a token are."""

    choices_R: Tensor
    """Index of each row in the flat choices [T K]."""
    tokens_R: Tensor
    """Token of each row."""
    rows_TK: Tensor
    """Row of each choice."""
    counts_E: Tensor
    """Rows of each expert, int64."""
    kept_R: Tensor | None = None
    """0 for a row that only fills the capacity of its expert, else 1; None if all are 1."""
    kept_TK: Tensor | None = None
    """0 for a choice that is dropped, else 1; None if all are 1."""


class MixtureOfExperts(nn.Module):
    """The experts that a router chooses for each token, and those that every token goes through.

    Args:
        spec: The model.
        shared: The feed-forward of every token, if there is one.
        layout: Each process routes its own tokens, and has the experts of its place in `layout.expert`.
    """

    def __init__(self, spec: ModelSpec, shared: nn.Module | None, layout: Layout) -> None:
        super().__init__()
        self.layout = layout
        self.router, self.experts, self.shared = Router(spec, layout.sequence), Experts(spec, layout.expert), shared
        self.capacity_factor: float | None = None
        """Rows of an expert as a multiple of an even share; nothing is dropped if None."""
        self.read_counts: Callable[[Tensor, int], list[int]] = read_counts
        """Gives rows for each process on the host, of so many if tokens go to experts evenly, which fake runs
        assume."""

    def forward(self, x_BSD: Tensor, loss_weight: Tensor | None = None) -> Tensor:
        """The sum of the experts of each token.

        Args:
            x_BSD: Normalized hidden states.
            loss_weight: Share of this micro batch in the mean loss, with which losses of the router count; without it
                they do not.
        """
        # Processes that have the same tokens take a part each.
        divides = self.layout.tensor.size > 1 and not self.layout.sequence_parallel
        own_BSD = take_part(x_BSD, self.layout.tensor, SEQUENCE) if divides else x_BSD
        x_TD = own_BSD.flatten(0, -2)
        scores_TK, experts_TK, counts_E = self.router(x_TD, loss_weight)
        if self.capacity_factor is None:
            plan = plan_rows(experts_TK, counts_E)
        else:
            plan = plan_capacity(scores_TK.detach(), experts_TK, counts_E, self.capacity_factor)
        rows_RD = _GatherRows.apply(x_TD, plan)
        scores_R = scores_TK.flatten()[plan.choices_R]
        scores_R = scores_R if plan.kept_R is None else scores_R * plan.kept_R
        y_BSD = _SumRows.apply(self.apply_experts(rows_RD, scores_R, plan.counts_E), plan).view_as(own_BSD)
        y_BSD = join_parts(y_BSD, self.layout.tensor, SEQUENCE) if divides else y_BSD
        return y_BSD if self.shared is None else y_BSD + self.shared(x_BSD)

    def apply_experts(self, rows_RD: Tensor, scores_R: Tensor, counts_E: Tensor) -> Tensor:
        """Rows sorted by expert, through their experts, which are those of several processes."""
        axis = self.layout.expert
        if axis.size == 1:
            return self.experts(rows_RD, scores_R, counts_E)
        # Of each process, the rows for each expert of this one.
        arriving_PE = torch.empty_like(counts_E)
        dist.all_to_all_single(arriving_PE, counts_E, group=axis.group)
        arriving_PE = arriving_PE.view(axis.size, -1)
        # The sizes of the exchange are needed on the host, which waits for the router here.
        sent = self.read_counts(counts_E.view(axis.size, -1).sum(1), rows_RD.shape[0])
        received = self.read_counts(arriving_PE.sum(1), rows_RD.shape[0])
        rows_RD = exchange_rows(rows_RD, sent, received, axis)
        scores_R = exchange_rows(scores_R, sent, received, axis)
        local_experts = torch.arange(arriving_PE.shape[1], device=counts_E.device).repeat(axis.size)
        order_R = local_experts.repeat_interleave(arriving_PE.flatten(), output_size=sum(received)).argsort(stable=True)
        y_RD = self.experts(rows_RD[order_R], scores_R[order_R], arriving_PE.sum(0))
        return exchange_rows(y_RD[_invert_order(order_R)], received, sent, axis)


class Experts(nn.Module):
    """The matrices of the experts of a process, one stack each; rows of `gate_up` are the gate, then the value that it
    gates."""

    def __init__(self, spec: ModelSpec, axis: Axis) -> None:
        super().__init__()
        assert spec.num_experts is not None
        number, width, hidden = share(spec.num_experts, axis), expert_ffn_size(spec), spec.hidden_size
        self.gate_up = nn.Parameter(torch.empty(number, 2 * width, hidden))
        self.down = nn.Parameter(torch.empty(number, hidden, width))
        has_bias = spec.add_bias_linear
        self.gate_up_bias = nn.Parameter(torch.empty(number, 2 * width)) if has_bias else None
        self.down_bias = nn.Parameter(torch.empty(number, hidden)) if has_bias else None
        self.clamp = spec.activation_clamp

    def forward(self, rows_RD: Tensor, scores_R: Tensor, counts_E: Tensor) -> Tensor:
        dtype = rows_RD.dtype
        biases = [None if bias is None else bias.to(dtype) for bias in (self.gate_up_bias, self.down_bias)]
        return run_experts(
            rows_RD, scores_R, counts_E, self.gate_up.to(dtype), self.down.to(dtype), biases[0], biases[1], self.clamp
        )


class Router(nn.Module):
    """Chooses the experts of a token by a linear score, in float32 or wider.

    Sources: Mixtral (arXiv 2401.04088, section 2.1); groups of experts (DeepSeek-V2, arXiv 2405.04434, section 2.2.2);
    sigmoid scores and balancing biases (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    Args:
        spec: The model.
        axis: The processes that share the tokens of a micro batch, over which its losses are computed.
    """

    balance_bias: Tensor
    """Added to the scores when experts are chosen, and only then; float32 [E], no gradient."""
    load: Tensor
    """Tokens of each expert in this step, int64 [E + 1]; the last number counts passes whose logits are not finite."""

    def __init__(self, spec: ModelSpec, axis: Axis) -> None:
        super().__init__()
        assert spec.num_experts is not None
        self.spec, self.num_experts, self.axis = spec, spec.num_experts, axis
        self.z_loss_coeff, self.bias_update_rate = 0.0, 0.0
        self.weight = nn.Parameter(torch.empty(self.num_experts, spec.hidden_size))
        self.bias = nn.Parameter(torch.empty(self.num_experts)) if spec.add_bias_linear else None
        self.is_balanced = spec.moe_router_enable_expert_bias
        if self.is_balanced:
            self.register_buffer("balance_bias", torch.zeros(self.num_experts))
        self.register_buffer("load", torch.zeros(self.num_experts + 1, dtype=torch.int64), persistent=False)

    def forward(self, x_TD: Tensor, loss_weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Scores and experts of each token, both [T, K], and how many tokens each expert has, [E]."""
        dtype = choose_wide_dtype(x_TD.dtype)
        logits_TE = F.linear(x_TD.to(dtype), self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype))
        scores_TK, experts_TK = self._choose_experts(logits_TE)
        chosen = experts_TK.flatten()
        counts_E = torch.zeros(self.num_experts, dtype=torch.int64, device=chosen.device)
        counts_E = counts_E.scatter_add(0, chosen, torch.ones_like(chosen))
        if torch.is_grad_enabled():
            self.load += torch.cat((counts_E, (~logits_TE.detach().isfinite().all()).long().unsqueeze(0)))
        if loss_weight is not None and (self.spec.moe_aux_loss_coeff or self.z_loss_coeff):
            loss = self._compute_loss(logits_TE, counts_E) * loss_weight
            scores_TK = add_loss(scores_TK, loss)
        return scores_TK, experts_TK, counts_E

    def _choose_experts(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        spec, is_sigmoid = self.spec, self.spec.moe_router_score_function == "sigmoid"
        is_late = not (is_sigmoid or spec.moe_router_pre_softmax)
        scores_TE = logits_TE if is_late else logits_TE.sigmoid() if is_sigmoid else logits_TE.softmax(-1)
        order_TE = scores_TE.detach()
        if self.is_balanced:
            order_TE = order_TE + self.balance_bias
        if spec.moe_router_num_groups and spec.moe_router_group_topk:
            order_TE = _keep_best_groups(order_TE, spec.moe_router_num_groups, spec.moe_router_group_topk, is_sigmoid)
        experts_TK = order_TE.topk(spec.moe_router_topk, -1).indices
        scores_TK = scores_TE.gather(1, experts_TK)
        if is_late:
            scores_TK = scores_TK.softmax(-1)
        elif spec.moe_router_norm_topk_prob:
            scores_TK = scores_TK / (scores_TK.sum(-1, keepdim=True) + SMALLEST_SUM)
        return scores_TK * spec.moe_router_topk_scaling_factor, experts_TK

    def _compute_loss(self, logits_TE: Tensor, counts_E: Tensor) -> Tensor:
        """The losses of the router for one token on average.

        Balance: E x sum over experts of (share of the choices) x (mean score), 1 if both are even (Switch Transformer,
        arXiv 2101.03961, equation 4; Megatron-LM, `switch_load_balancing_loss_func`). z: the mean square of
        log-sum-exp (ST-MoE, arXiv 2202.08906, equation 5).
        """
        spec, tokens = self.spec, logits_TE.shape[0] * self.axis.size
        if spec.moe_router_score_function == "sigmoid":
            scores_TE = logits_TE.sigmoid()
            scores_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + SMALLEST_SUM)
        else:
            scores_TE = logits_TE.softmax(-1)
        # Both are sums over all tokens; each process adds the gradients of its own.
        counts_E, sums_E = add_up(counts_E, self.axis), add_up(scores_TE.sum(0), self.axis)
        balance = (counts_E * sums_E).sum() * (self.num_experts / (tokens * tokens * spec.moe_router_topk))
        z = logits_TE.logsumexp(-1).square().sum() / tokens
        return spec.moe_aux_loss_coeff * balance + self.z_loss_coeff * z


def _keep_best_groups(order_TE: Tensor, num_groups: int, num_kept: int, by_two: bool) -> Tensor:
    """-inf for the experts outside of a token's best groups, by their best expert or the sum of their two best."""
    grouped_TNM = order_TE.unflatten(1, (num_groups, -1))
    best_TN = grouped_TNM.topk(min(2 if by_two else 1, grouped_TNM.shape[2]), -1).values.sum(-1)
    is_kept_TN = torch.zeros_like(best_TN, dtype=torch.bool).scatter(1, best_TN.topk(num_kept, -1).indices, True)
    return grouped_TNM.masked_fill(~is_kept_TN.unsqueeze(-1), -math.inf).flatten(1)


def read_counts(counts_P: Tensor, _: int) -> list[int]:
    """The values of `counts_P`."""
    found: list[int] = counts_P.tolist()
    return found


def plan_rows(experts_TK: Tensor, counts_E: Tensor) -> RowPlan:
    """A row for each choice, sorted by expert, tokens in order."""
    choices_R = experts_TK.flatten().argsort(stable=True)
    return RowPlan(choices_R, choices_R // experts_TK.shape[1], _invert_order(choices_R).view_as(experts_TK), counts_E)


def plan_capacity(scores_TK: Tensor, experts_TK: Tensor, counts_E: Tensor, factor: float) -> RowPlan:
    """As many rows for each expert: factor x an even share. It drops the lowest scores of an expert that has more.

    As Megatron-LM does with moe_expert_capacity_factor, moe_pad_expert_input_to_capacity and the policy `probs`. All
    shapes are known before the choices are.
    """
    num_choices, num_experts = experts_TK.numel(), counts_E.shape[0]
    capacity = math.ceil(num_choices / num_experts * factor)
    chosen = experts_TK.flatten()
    by_score = scores_TK.flatten().argsort(descending=True, stable=True)
    sorted_choices = by_score[chosen[by_score].argsort(stable=True)]
    starts_E = counts_E.cumsum(0) - counts_E
    slots = torch.arange(capacity, device=chosen.device)
    kept_R = (slots < counts_E.unsqueeze(1)).flatten()
    choices_R = sorted_choices[(starts_E.unsqueeze(1) + slots).clamp_max(num_choices - 1).flatten()]
    ranks = _invert_order(sorted_choices) - starts_E[chosen]
    rows = chosen * capacity + ranks.clamp_max(capacity - 1)
    dtype = choose_wide_dtype(scores_TK.dtype)
    return RowPlan(
        choices_R,
        choices_R // experts_TK.shape[1],
        rows.view_as(experts_TK),
        torch.full_like(counts_E, capacity),
        kept_R.to(dtype),
        (ranks < capacity).to(dtype).view_as(experts_TK),
    )


def _invert_order(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=order.device))


class _GatherRows(torch.autograd.Function):
    """Tokens as rows of experts. The derivative is a sum in a fixed order, not of atomic additions."""

    @staticmethod
    def forward(ctx, x_TD: Tensor, plan: RowPlan) -> Tensor:
        ctx.plan = plan
        return x_TD.index_select(0, plan.tokens_R)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RD: Tensor):
        return _sum_rows(grad_RD, ctx.plan), None


class _SumRows(torch.autograd.Function):
    """The sum of the rows of each token."""

    @staticmethod
    def forward(ctx, rows_RD: Tensor, plan: RowPlan) -> Tensor:
        ctx.plan = plan
        return _sum_rows(rows_RD, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TD: Tensor):
        return grad_TD.index_select(0, ctx.plan.tokens_R), None


def _sum_rows(rows_RD: Tensor, plan: RowPlan) -> Tensor:
    # One pass without the rows of all choices side by side in memory.
    weights_TK = None if plan.kept_TK is None else plan.kept_TK.to(rows_RD.dtype)
    return F.embedding_bag(plan.rows_TK, rows_RD, mode="sum", per_sample_weights=weights_TK)


def apply_router_settings(model: nn.Module, settings: RouterSettings) -> None:
    """Train the routers of a model as an experiment asks for."""
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.capacity_factor = settings.moe_expert_capacity_factor
            module.router.z_loss_coeff = settings.moe_z_loss_coeff
            module.router.bias_update_rate = settings.moe_router_bias_update_rate


def fill_buffers(model: nn.Module) -> None:
    """Fill what a model that was on the meta device lacks: biases and loads are zero before the first step."""
    for router in list_routers(model):
        router.load.zero_()
        if router.is_balanced:
            router.balance_bias.zero_()


@torch.no_grad()
def end_routing(routers: Sequence[Router], skipped: Tensor, stage: Axis) -> Tensor | None:
    """The loads of a step, of all its processes, [N, E + 1]; begins those of the next one. The last number of a router
    is that of this process.

    Raises the biases of experts with less than the mean load, and lowers the others, unless the step was `skipped`: by
    moe_router_bias_update_rate x sign(mean load - load), as Megatron-LM's `get_updated_expert_bias` (DeepSeek-V3, arXiv
    2412.19437, section 2.1.2). All processes of `stage` must call it.
    """
    if not routers:
        return None
    loads_NE, failures_N = (
        part.clone() for part in torch.stack([router.load for router in routers]).tensor_split([-1], 1)
    )
    if stage.size > 1:
        dist.all_reduce(loads_NE, group=stage.group)
    changes_NE = (loads_NE.double().mean(1, keepdim=True) - loads_NE).sign() * ~skipped
    for router, change_E in zip(routers, changes_NE, strict=True):
        if router.is_balanced:
            router.balance_bias += change_E * router.bias_update_rate
        router.load.zero_()
    return torch.cat((loads_NE, failures_N), 1)


def iterate_balance_biases(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The biases that balance experts, with their names; they have no gradient."""
    return ((name, bias) for name, bias in model.named_buffers() if name.endswith("router.balance_bias"))


def list_routers(model: nn.Module) -> list[Router]:
    """The routers of a model, the first layer's first."""
    return [module for module in model.modules() if isinstance(module, Router)]
