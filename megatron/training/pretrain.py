"""A whole pretraining run of one rank, from validated flags to the end of the job."""

from __future__ import annotations

import logging
import os
import warnings
from argparse import Namespace
from typing import Any

import torch
from megatron.core.jit import disable_jit_fuser

from megatron.training import device
from megatron.training.arguments import (
    ddp_config_from_args,
    optimizer_config_from_args,
    transformer_config_from_args,
)
from megatron.training.checkpoint_fit import check_fit
from megatron.training.checkpointing import load_checkpoint
from megatron.training.data import (
    DataSets,
    build_datasets,
    chunk_reads_data,
    consume_loader_randoms,
)
from megatron.training.data_fit import check_splits
from megatron.training.hooks import NoHooks, TrainingHooks
from megatron.training.initialize import (
    adopt_rank,
    create_process_groups,
    initialize_core,
    seed_everything,
    warm_up_fused_functions,
)
from megatron.training.model import build_model
from megatron.training.optimizer import build_optimizer, build_scheduler
from megatron.training.output import print_datetime, print_rank_0
from megatron.training.tokenizer import Tokenizer, build_tokenizer, padded_vocab_size
from megatron.training.trainer import Trainer


def pretrain(args: Namespace, hooks: TrainingHooks | None = None) -> int:
    """Run the job that validated `args` describe; the exit code.

    Every rank of the job calls it. Raises UsageError before any process group is made.
    """
    hooks = hooks or NoHooks()
    if not hooks.acquire_rank(args):
        return 0
    adopt_rank(args)
    _quieten(args)
    device.install(args.local_rank)
    tokenizer = check_inputs(args)
    trainer = build_trainer(args, hooks, tokenizer)
    hooks.on_ready(trainer)
    trainer.run()
    return 0


def check_inputs(args: Namespace) -> Tokenizer:
    """The tokenizer, with `args.padded_vocab_size` set.

    Raises UsageError for a checkpoint, data or a tokenizer that do not fit the flags. Needs no
    process group.
    """
    tokenizer = build_tokenizer(args)
    if not getattr(args, "padded_vocab_size", None):
        args.padded_vocab_size = padded_vocab_size(tokenizer.vocab_size, args)
    check_splits(args)
    check_fit(args)
    return tokenizer


def build_trainer(args: Namespace, hooks: TrainingHooks, tokenizer: Tokenizer) -> Trainer:
    """Everything up to the first iteration.

    A replacement builds it alone, among groups whose collectives do nothing: no result of a
    collective is read on the way, and what they would have brought comes with `hooks.on_ready`.
    """
    initialize_core(args)
    hooks.create_process_groups(args, lambda **overrides: create_process_groups(args, **overrides))
    seed_everything(args)
    warm_up_fused_functions(args)
    print_datetime("after megatron is initialized")
    alone = hooks.is_replacement()
    config = transformer_config_from_args(args)
    model = build_model(args, config, None if args.skip_train else ddp_config_from_args)
    optimizer = scheduler = None
    if not args.skip_train:
        optimizer = build_optimizer(args, optimizer_config_from_args(args), model, alone=alone)
        scheduler = build_scheduler(args, optimizer)
    print_datetime("after model, optimizer, and learning rate scheduler are built")
    datasets = _datasets(args, tokenizer, model)
    trainer = Trainer(
        args=args,
        config=config,
        hooks=hooks,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        datasets=datasets,
    )
    if not alone and load_checkpoint(trainer):
        trainer.state.start_iteration = trainer.state.iteration
        trainer.rebuild_data_iterators()
    print_rank_0("done with setup ...")
    return trainer


def _datasets(args: Namespace, tokenizer: Tokenizer, model: list[Any]) -> DataSets:
    print_rank_0("> building train, validation, and test datasets for GPT ...")
    reads_data = any(chunk_reads_data(chunk) for chunk in model)
    datasets = build_datasets(args, tokenizer, reads_data=reads_data)
    num_readers = sum(chunk_reads_data(chunk) for chunk in model)
    consume_loader_randoms(datasets, num_readers)
    print_datetime("after dataloaders are built")
    return datasets


def _quieten(args: Namespace) -> None:
    """Log level as asked; warnings of libraries on rank 0 alone."""
    level = args.logging_level
    if level is None and "MEGATRON_LOGGING_LEVEL" in os.environ:
        level = int(os.environ["MEGATRON_LOGGING_LEVEL"])
    if level is not None:
        logging.getLogger().setLevel(level)
    if args.rank != 0:
        warnings.filterwarnings("ignore", category=UserWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
    if getattr(args, "disable_jit_fuser", False):
        disable_jit_fuser()


def destroy_process_groups() -> None:
    """Leave the job's groups, at the end of a process that is about to exit."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
