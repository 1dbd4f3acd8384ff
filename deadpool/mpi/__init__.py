"""Replicas by MPI, in a sidecar process a rank, where a dead peer hurts neither trainer nor
guardian. See docs/transports.md."""
