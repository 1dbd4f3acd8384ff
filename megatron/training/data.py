"""Data sets, loaders and iterators of a GPT run.

Data sets are built once; iterators are rebuilt at will from the counts of consumed samples, so any
iteration can read its own samples again.
"""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.utils import Split, get_blend_from_list
from megatron.core.rerun_state_machine import RerunDataIterator

from megatron.training import device
from megatron.training.sampling import SampleOrder

Blend = tuple[list[str], list[float] | None]


@dataclasses.dataclass(slots=True, kw_only=True)
class DataSets:
    """The three splits. A split is None on ranks that do not read it."""

    train: Any
    valid: Any
    test: Any
    has_valid: bool
    """Whether the split exists at all: the same on every rank."""
    has_test: bool


def chunk_reads_data(chunk: torch.nn.Module) -> bool:
    """Only the first and last model chunk of the pipeline take a batch."""
    inner: Any = chunk
    while hasattr(inner, "module"):
        inner = inner.module
    return bool(inner.pre_process or inner.post_process)


def sample_counts(args: Namespace) -> tuple[int, int, int]:
    """How many samples of train, valid and test the run will read, as Megatron-LM counts them."""
    train = args.train_samples or args.train_iters * args.global_batch_size
    rounds = 1 if args.skip_train else args.train_iters // args.eval_interval + 1
    per_round = args.eval_iters * args.global_batch_size
    return train, rounds * per_round, per_round


def build_datasets(args: Namespace, tokenizer: Any, *, reads_data: bool) -> DataSets:
    """Build (or read from the cache) the index of every split.

    All ranks call it together: rank 0 writes the cache before the others read it. A process that
    joins a running job finds the cache complete.
    """
    config = dataset_config(args, tokenizer)

    def is_built_here() -> bool:
        return reads_data and parallel_state.get_tensor_model_parallel_rank() == 0

    dataset_class = MockGPTDataset if args.mock_data else GPTDataset
    train, valid, test = BlendedMegatronDatasetBuilder(
        dataset_class, list(sample_counts(args)), is_built_here, config
    ).build()
    evaluates = args.eval_iters > 0
    return DataSets(
        train=train,
        valid=valid,
        test=test,
        has_valid=evaluates and _has_split(config, Split.valid),
        has_test=evaluates and _has_split(config, Split.test),
    )


def _has_split(config: GPTDatasetConfig, split: Split) -> bool:
    if config.blend_per_split is not None:
        return config.blend_per_split[split.value] is not None
    return config.split_matrix is not None and config.split_matrix[split.value] is not None


def dataset_config(args: Namespace, tokenizer: Any) -> GPTDatasetConfig:
    """megatron-core's data set configuration for these flags."""
    blend, blend_per_split = data_blends(args)
    values = {name: value for name, value in vars(args).items() if value is not None}
    values.update(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        path_to_cache=args.data_cache_path,
        tokenizer=tokenizer,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        fast_cache_load=getattr(args, "dataloader_fast_cache_load", False),
        defer_npy_index_mmap=getattr(args, "dataloader_defer_npy_index_mmap", False),
        sequences_per_dataset=_sequences_per_dataset(args),
        sequence_parallel_size=args.tensor_model_parallel_size * int(args.sequence_parallel),
    )
    known = {field.name for field in dataclasses.fields(GPTDatasetConfig) if field.init}
    return GPTDatasetConfig(**{name: values[name] for name in known & values.keys()})


def _sequences_per_dataset(args: Namespace) -> dict[str, int] | None:
    path = getattr(args, "per_dataset_sequences_path", None)
    if path is None:
        return None
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def data_blends(args: Namespace) -> tuple[Blend | None, list[Blend | None] | None]:
    """(one blend to be split, or None; a blend per split, or None) from the data flags."""
    if args.data_args_path is not None:
        with open(args.data_args_path, encoding="utf-8") as file:
            return get_blend_from_list(file.read().split()), None
    if args.data_path is not None:
        return get_blend_from_list(args.data_path), None
    if args.per_split_data_args_path is not None:
        with open(args.per_split_data_args_path, encoding="utf-8") as file:
            parts = json.load(file)
        lists = [parts[split] for split in ("train", "valid", "test")]
        lists = [item.split() if isinstance(item, str) else item for item in lists]
        return None, [get_blend_from_list(item) for item in lists]
    lists = [args.train_data_path, args.valid_data_path, args.test_data_path]
    if any(item is not None for item in lists):
        return None, [get_blend_from_list(item) for item in lists]
    return None, None


class BatchStream:
    """Microbatches of one split for one model chunk, opened at the first read.

    Lazy because a stream at its end is an error only for who reads on.
    """

    def __init__(self, args: Namespace, dataset: Any, consumed_samples: int) -> None:
        self._args = args
        self._dataset = dataset
        self._consumed = consumed_samples
        self._batches: Iterator[dict[str, torch.Tensor]] | None = None

    def __iter__(self) -> BatchStream:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        if self._batches is None:
            self._batches = iter(self._loader())
        return next(self._batches)

    def _loader(self) -> Any:
        args = self._args
        order = SampleOrder(
            total_samples=len(self._dataset),
            consumed_samples=self._consumed,
            micro_batch_size=args.micro_batch_size,
            data_parallel_rank=parallel_state.get_data_parallel_rank(),
            data_parallel_size=parallel_state.get_data_parallel_world_size(),
            shuffled=args.dataloader_type == "cyclic",
            data_sharding=args.data_sharding,
        )
        return torch.utils.data.DataLoader(
            self._dataset,
            batch_sampler=order,
            num_workers=args.num_workers,
            pin_memory=device.has_gpu(),
            persistent_workers=args.num_workers > 0,
            # Whatever start method this process was given: a fork has everything imported.
            multiprocessing_context="fork" if args.num_workers > 0 else None,
            # A generator of its own: opening a stream again must not move the run's random state.
            generator=torch.Generator(),
        )


def open_stream(args: Namespace, dataset: Any, consumed_samples: int) -> RerunDataIterator | None:
    """An iterator over `dataset` that skips `consumed_samples`; None without a data set here."""
    if dataset is None:
        return None
    return RerunDataIterator(BatchStream(args, dataset, consumed_samples))


def consume_loader_randoms(datasets: DataSets, num_chunks: int) -> None:
    """Draw what opening the loaders draws from the default generator in Megatron-LM.

    There, torch's DataLoader takes one seed per iterator from the CPU's generator. On a GPU nothing
    later depends on that; on a CPU the same generator drives dropout, and a run is comparable to
    Megatron-LM's only if the draws are made. All tensor-parallel ranks draw, as their dropout masks
    must agree.
    """
    if device.has_gpu():
        return
    present = 1 + int(datasets.has_valid) + int(datasets.has_test)
    for _ in range(present * num_chunks):
        torch.empty((), dtype=torch.int64).random_()
