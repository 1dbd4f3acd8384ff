"""All that differs between a run on GPUs and a run on CPUs.

megatron-core 0.16.1 assumes CUDA in many places: literal `device='cuda'`, `torch.cuda` calls,
checks of `Tensor.type()`. On a machine without a GPU, `install()` gives those calls a CPU meaning;
on a machine with one it changes nothing but the device of the process. Importing this module
touches neither CUDA nor a thread pool, so a process that imported it can be forked.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

_CPU = torch.device("cpu")
_FACTORIES = (
    "tensor", "zeros", "ones", "empty", "full", "rand", "randn", "randint", "arange", "randperm",
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "eye",
    "linspace", "as_tensor", "empty_strided",
)  # fmt: skip
_CUDA_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}
_installed = False


def has_gpu() -> bool:
    """Whether this process can compute on a GPU. First asked in a process that will not fork."""
    return torch.cuda.is_available()


def default_backend() -> str:
    """The `torch.distributed` backend for this machine: nccl with a GPU, gloo without."""
    return "nccl" if has_gpu() else "gloo"


def device() -> torch.device:
    """The device this rank computes on."""
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu() else _CPU


def install(local_rank: int = 0) -> torch.device:
    """Choose this process's device and, without a GPU, give CUDA calls a CPU meaning.

    Called once in a rank's own process, before any process group is made. Calling it again is
    harmless.
    """
    global _installed
    first_call, _installed = not _installed, True
    if first_call:
        _mend_megatron_core()
    if has_gpu():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
        return device()
    if first_call:
        # One thread a rank unless told otherwise: ranks of one machine share its cores.
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        # megatron-core's fused functions are torch.compile'd at import; compiling for a CPU costs
        # minutes of C++ and gains nothing here.
        torch.compiler.set_stance("force_eager")
        _replace_cuda_module()
        _replace_factories()
        _replace_tensor_methods()
        _replace_random_state()
    return _CPU


class _Stream:
    """A CUDA stream's interface where everything is in order anyway."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = _CPU
        self.cuda_stream = 0

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> _Event:
        return event if event is not None else _Event()


class _Event:
    """A CUDA event that has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


@contextlib.contextmanager
def _null_context(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _replace_cuda_module() -> None:
    stream = _Stream()
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.set_device = _nothing
    cuda.Stream = _Stream
    cuda.Event = _Event
    cuda.stream = _null_context
    cuda.device = _null_context
    cuda.current_stream = lambda device=None: stream
    cuda.default_stream = lambda device=None: stream
    cuda.set_stream = _nothing
    cuda.synchronize = _nothing
    cuda.empty_cache = _nothing
    cuda.is_current_stream_capturing = lambda: False
    cuda.memory_allocated = lambda device=None: 0
    cuda.max_memory_allocated = lambda device=None: 0
    cuda.memory_reserved = lambda device=None: 0
    cuda.max_memory_reserved = lambda device=None: 0
    cuda.reset_peak_memory_stats = _nothing
    cuda.memory_stats = lambda device=None: {}
    cuda.nvtx.range_push = _nothing
    cuda.nvtx.range_pop = _nothing
    for dtype_name in ("Float", "Half", "BFloat16", "Int", "Long", "Byte"):
        setattr(cuda, f"{dtype_name}Tensor", getattr(torch, f"{dtype_name}Tensor"))


def _is_cuda(target: Any) -> bool:
    if isinstance(target, str):
        return target.startswith("cuda")
    return isinstance(target, torch.device) and target.type == "cuda"


def _replace_factories() -> None:
    def on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(factory)
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            if "device" in kwargs and _is_cuda(kwargs["device"]):
                kwargs["device"] = _CPU
            return factory(*args, **kwargs)

        return make

    for name in _FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))


def _replace_tensor_methods() -> None:
    tensor: Any = torch.Tensor
    plain_type, plain_to = tensor.type, tensor.to

    def type_name(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        # megatron-core's optimizers sort parameters by the names of CUDA tensor types.
        if dtype is None and self.dtype in _CUDA_TYPE_NAMES and self.device.type == "cpu":
            return _CUDA_TYPE_NAMES[self.dtype]
        return plain_type(self, dtype, *args, **kwargs)

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _is_cuda(args[0]):
            args = (_CPU, *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return plain_to(self, *args, **kwargs)

    tensor.type = type_name
    tensor.to = to
    tensor.cuda = lambda self, *args, **kwargs: self
    tensor.pin_memory = lambda self, *args, **kwargs: self
    tensor.record_stream = _nothing
    module: Any = torch.nn.Module
    module.cuda = lambda self, *args, **kwargs: self


def _replace_random_state() -> None:
    """CUDA's generator is the CPU's one default generator."""
    from megatron.core.tensor_parallel import random as core_random

    def get_state(device: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(new_state)

    def manual_seed(seed: int) -> None:
        # Not torch.manual_seed, which itself calls this.
        torch.default_generator.manual_seed(int(seed))

    cuda: Any = torch.cuda
    for module in (cuda, cuda.random):
        module.get_rng_state = get_state
        module.set_rng_state = set_state
        module.manual_seed = manual_seed
        module.manual_seed_all = manual_seed
    core: Any = core_random
    core._get_cuda_rng_state = get_state
    core._set_cuda_rng_state = set_state
    plain_fork = core.CudaRNGStatesTracker.fork

    @contextlib.contextmanager
    def fork(self: Any, name: str = core._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        # The tracker warns when the CPU's state changes inside; here that is the point of it.
        with _silent("megatron.core.tensor_parallel.random"), plain_fork(self, name):
            yield

    core.CudaRNGStatesTracker.fork = fork


@contextlib.contextmanager
def _silent(logger_name: str) -> Iterator[None]:
    import logging

    logger = logging.getLogger(logger_name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _mend_megatron_core() -> None:
    """Two faults of megatron-core 0.16.1 that a GPU run meets as well."""
    from megatron.core.transformer.moe import moe_utils

    # 0.16.1 names it without defining it when Transformer Engine is absent.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]

    plain = torch.distributed.all_to_all_single

    @functools.wraps(plain)
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        **kwargs: Any,
    ) -> Any:
        # torch 2.13 takes lists; the MoE all-to-all dispatcher passes tensors.
        return plain(
            output, input, _as_list(output_split_sizes), _as_list(input_split_sizes), **kwargs
        )

    torch.distributed.all_to_all_single = all_to_all_single


def _as_list(sizes: Any) -> Any:
    return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes
