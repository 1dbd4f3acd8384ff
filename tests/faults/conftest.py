"""Whole jobs, as in `tests/deadpool`."""

from tests.deadpool.conftest import data_cache, peace, run_faulty, run_job

__all__ = ["data_cache", "peace", "run_faulty", "run_job"]
