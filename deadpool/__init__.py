"""Megatron training that a dead node does not stop."""

__version__ = "0.1.0"
