"""Megatron-LM 0.16.1's command line: parsing, validation, and the config objects it yields."""

from megatron.training.arguments.configs import (
    ddp_config_from_args,
    optimizer_config_from_args,
    transformer_config_from_args,
)
from megatron.training.arguments.errors import UsageError, exit_with_usage_error
from megatron.training.arguments.parser import build_parser, parse_args
from megatron.training.arguments.validation import validate_args

__all__ = [
    "UsageError",
    "build_parser",
    "ddp_config_from_args",
    "exit_with_usage_error",
    "optimizer_config_from_args",
    "parse_args",
    "transformer_config_from_args",
    "validate_args",
]
