"""Megatron's optimizers, opened: named shard tensors, and a step that snapshots.

What an optimizer owns is found in the torch optimizer inside it: its `param_groups` hold the main
parameters (a data-parallel shard of them with the distributed optimizer, in fp32), its `state` the
moments. That is the same for the distributed, the mixed-precision and the fp32 optimizer; a chained
optimizer (dense and expert parameters have data-parallel groups of their own) is a list of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer


def leaf_optimizers(optimizer: Any) -> list[Any]:
    """The optimizers of a chain that own parameters on this rank, in chain order."""
    leaves = getattr(optimizer, "chained_optimizers", [optimizer])
    return [leaf for leaf in leaves if getattr(leaf, "optimizer", None) is not None]


def initialize_state(optimizer: Any) -> None:
    """Allocate the moments now instead of in the first step, with the values that it would give
    them: a snapshot has a fixed layout, and one exists before the first step."""
    for leaf in leaf_optimizers(optimizer):
        inner = leaf.optimizer
        is_torch_adam = isinstance(inner, torch.optim.Adam | torch.optim.AdamW)
        for group in inner.param_groups:
            for parameter in group["params"]:
                state = inner.state[parameter]
                if state:
                    continue
                if is_torch_adam:
                    state["step"] = torch.tensor(0.0, dtype=torch.float32)
                    state["exp_avg"] = torch.zeros_like(parameter.data)
                    state["exp_avg_sq"] = torch.zeros_like(parameter.data)
                elif group.get("momentum"):
                    state["momentum_buffer"] = torch.zeros_like(parameter.data)
        if leaf.init_state_fn is not None and not is_torch_adam:
            leaf.init_state_fn(inner, leaf.config)


def shard_tensors(optimizer: Any) -> dict[str, torch.Tensor]:
    """Every tensor that the optimizer owns on this rank, by a name equal on all members of a slot:
    main parameters, moments, step counts. The live tensors, not copies."""
    tensors: dict[str, torch.Tensor] = {}
    for index, leaf in enumerate(leaf_optimizers(optimizer)):
        position = 0
        for group in leaf.optimizer.param_groups:
            for parameter in group["params"]:
                prefix = f"optimizer{index}/{position}"
                tensors[f"{prefix}/main"] = parameter.data
                for name, value in sorted(leaf.optimizer.state[parameter].items()):
                    if isinstance(value, torch.Tensor):
                        tensors[f"{prefix}/{name}"] = value
                position += 1
    return tensors


def scalar_state(optimizer: Any) -> list[dict[str, Any]]:
    """JSON-able: learning rates, step counts and loss scalers, for each leaf."""
    states = []
    for leaf in leaf_optimizers(optimizer):
        groups = [
            {
                key: value
                for key, value in group.items()
                if isinstance(value, int | float | bool) or value is None
            }
            for group in leaf.optimizer.param_groups
        ]
        states.append({"groups": groups, "scaler": _scaler_state(leaf)})
    return states


def load_scalar_state(optimizer: Any, states: list[dict[str, Any]]) -> None:
    """Put back what `scalar_state` gave."""
    for leaf, state in zip(leaf_optimizers(optimizer), states, strict=True):
        for group, saved in zip(leaf.optimizer.param_groups, state["groups"], strict=True):
            group.update(saved)
        scaler = getattr(leaf, "grad_scaler", None)
        if scaler is not None and state["scaler"] is not None:
            saved = dict(state["scaler"])
            scale = scaler.state_dict().get("scale")
            if isinstance(scale, torch.Tensor):
                saved["scale"] = torch.tensor(
                    saved["scale"], dtype=scale.dtype, device=scale.device
                ).reshape(scale.shape)
            scaler.load_state_dict(saved)


def _scaler_state(leaf: Any) -> dict[str, Any] | None:
    scaler = getattr(leaf, "grad_scaler", None)
    if scaler is None:
        return None
    return {
        key: value.item() if isinstance(value, torch.Tensor) else value
        for key, value in scaler.state_dict().items()
    }


def rebuild_parameters(model: list[Any], optimizer: Any) -> None:
    """Model parameters from the restored main parameters. All ranks call it together.

    With the distributed optimizer each rank casts its own shard and gathers the rest from its
    data-parallel peers, as after every step: a replaced slot takes all but its own shard from
    healthy peers. Other optimizers own whole parameters and only cast.
    """
    gathers = False
    for leaf in leaf_optimizers(optimizer):
        if isinstance(leaf, MixedPrecisionOptimizer):
            leaf._copy_main_params_to_model_params()
        gathers = gathers or isinstance(leaf, DistributedOptimizer)
    if gathers:
        for chunk in model:
            chunk.start_param_sync(force_sync=True)


def patch_step(optimizer: Any, *, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call `before` and `after` around each `optimizer.step()`, on the same thread. `before` may
    wait for what the step overwrites; `after` starts to copy what it wrote."""
    step = optimizer.step

    def step_with_snapshot(*args: Any, **kwargs: Any) -> Any:
        before()
        result = step(*args, **kwargs)
        after()
        return result

    optimizer.step = step_with_snapshot


def patch_inner_step(optimizer: Any, after: Callable[[], None]) -> None:
    """Call `after` once each owned parameter is updated and before any is gathered (fault
    injection)."""
    for leaf in leaf_optimizers(optimizer):
        inner_step = leaf.optimizer.step

        def step_then(*args: Any, inner_step: Any = inner_step, **kwargs: Any) -> Any:
            result = inner_step(*args, **kwargs)
            after()
            return result

        leaf.optimizer.step = step_then
