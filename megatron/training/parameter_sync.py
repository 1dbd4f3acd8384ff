"""When parameters are gathered: with the optimizer step, or overlapped with the next forward."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.transformer import TransformerConfig


class ParameterSync:
    """Switches `--overlap-param-gather` on and off, and sets megatron-core's sync functions.

    The overlap starts after the first successful step, so that a fault in loading or initialization
    is not spread by the first gather.
    """

    def __init__(self, args: Namespace, config: TransformerConfig, model: list[Any]) -> None:
        self._args = args
        self._config = config
        self._model = model
        self._possible = bool(args.use_distributed_optimizer and args.overlap_param_gather)
        self._incomplete = False
        """Whether a step was taken whose parameters may not have been gathered since."""

    def configure(self) -> None:
        """Set `no_sync_func`, `grad_sync_func` and `param_sync_func` for the state we are in."""
        args, config = self._args, self._config
        config.no_sync_func = config.grad_sync_func = config.param_sync_func = None
        if args.overlap_grad_reduce:
            config.no_sync_func = self._per_chunk("no_sync")
            if args.align_grad_reduce:
                config.grad_sync_func = self._per_chunk("start_grad_sync")
        if self._overlapping and args.align_param_gather:
            config.param_sync_func = self._per_chunk("start_param_sync")

    def _per_chunk(self, method: str) -> list[Callable[..., Any]] | Callable[..., Any]:
        functions = [getattr(chunk, method) for chunk in self._model]
        return functions if len(functions) > 1 else functions[0]

    @property
    def _overlapping(self) -> bool:
        return self._possible and bool(self._model[0].remove_forward_pre_hook_handles)

    def begin(self) -> None:
        """No overlap until the next successful step; parameters are complete as they are."""
        self._incomplete = False
        if not self._possible:
            return
        for chunk in self._model:
            if chunk.remove_forward_pre_hook_handles:
                chunk.disable_forward_pre_hook(param_sync=False)

    def overlap(self) -> None:
        """A step was taken: from now on each forward pass gathers what it needs."""
        if not self._possible:
            return
        self._incomplete = True
        if not self._overlapping:
            self._enable()

    def _enable(self) -> None:
        for chunk in self._model:
            chunk.enable_forward_pre_hook()
        self.configure()

    def complete(self) -> None:
        """Gather what is outstanding now. All ranks call it together."""
        if self._incomplete:
            for chunk in self._model:
                chunk.start_param_sync(force_sync=True)
            self._incomplete = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Complete parameters and no hooks inside. All ranks enter together."""
        if not self._overlapping:
            yield
            return
        for chunk in self._model:
            chunk.disable_forward_pre_hook(param_sync=True)
        yield
        self._enable()
