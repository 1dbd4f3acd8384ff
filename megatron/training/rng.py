"""The random-number state of a rank, as a flat dict of CPU tensors.

Every entry has a fixed shape and dtype for a given build of Python, numpy and torch, so buffers for
it can be laid out once.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron.training import device

_TRACKER = "tracker/"


def collect_rng_state() -> dict[str, torch.Tensor]:
    """Copy the state of every generator a rank draws from.

    `python`: [628] int64, `numpy`: [627] int64, `torch`: uint8, `cuda` (with a GPU): uint8, and
    `tracker/<name>`: uint8 for each state of megatron-core's tracker. All on the CPU.
    """
    version, internal, gauss = random.getstate()
    python_state = [version, *internal, int(gauss is not None)]
    numpy_state: Any = np.random.get_state(legacy=True)
    words = [*numpy_state[1].tolist(), numpy_state[2], numpy_state[3]]
    state = {
        "python": torch.tensor(python_state, dtype=torch.int64),
        "python_gauss": torch.tensor([gauss or 0.0], dtype=torch.float64),
        "numpy": torch.tensor(words, dtype=torch.int64),
        "numpy_gauss": torch.tensor([numpy_state[4]], dtype=torch.float64),
        "torch": torch.get_rng_state().clone(),
    }
    if device.has_gpu():
        state["cuda"] = torch.cuda.get_rng_state().cpu().clone()
    for name, value in get_cuda_rng_tracker().get_states().items():
        tensor = value.get_state() if isinstance(value, torch.Generator) else value
        state[_TRACKER + name] = tensor.cpu().clone()
    return state


def restore_rng_state(state: dict[str, torch.Tensor]) -> None:
    """Put back what `collect_rng_state` returned, to the bit."""
    words = [int(word) for word in state["python"].tolist()]
    gauss = state["python_gauss"].item() if words[-1] else None
    random.setstate((words[0], tuple(words[1:-1]), gauss))
    numpy_words = state["numpy"].tolist()
    np.random.set_state(
        (
            "MT19937",
            np.array(numpy_words[:-2], dtype=np.uint32),
            int(numpy_words[-2]),
            int(numpy_words[-1]),
            state["numpy_gauss"].item(),
        )
    )
    torch.set_rng_state(state["torch"].clone())
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].clone())
    tracker = get_cuda_rng_tracker()
    current = tracker.get_states()
    restored = {}
    for key, value in state.items():
        if not key.startswith(_TRACKER):
            continue
        name = key.removeprefix(_TRACKER)
        if isinstance(current.get(name), torch.Generator):
            current[name].set_state(value)
            restored[name] = current[name]
        else:
            restored[name] = value.clone()
    tracker.set_states(restored)
