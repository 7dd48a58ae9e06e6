"""Benchmarks run one by one, on whatever JAX finds."""

import os

import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="a few shapes only")


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict) -> None:
    from benchmarks import timing

    machine_info["fusedops"] = timing.environment()


@pytest.fixture
def record(benchmark):
    """Stores one row: `record(call, name=value, ...)`; `call` is what pytest-benchmark times by the host's clock."""
    from benchmarks import timing

    def store(call, **info):
        benchmark.extra_info.update({**timing.environment(), **info})
        benchmark.pedantic(lambda: __import__("jax").block_until_ready(call()), rounds=3, warmup_rounds=1)

    return store
