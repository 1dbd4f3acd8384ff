"""Megatron-LM's command line and training loop, written fresh on megatron-core."""
