"""Options and the fixture of the benchmarks, which run one by one, on whatever JAX finds."""

import os
import time

import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")  # plain JAX needs room for its logits
STARTED = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fusedops")
    group.addoption("--quick", action="store_true", help="a few shapes only")
    group.addoption("--mode", choices=("burst", "sustained"), default="burst", help="see benchmarks/timing.py")
    group.addoption("--budget", type=float, metavar="SECONDS", help="skip what has not begun after so long")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "default")


def pytest_report_header() -> list[str]:
    from benchmarks import timing

    return ["fusedops: " + ", ".join(f"{k} {v}" for k, v in timing.environment().items())]


def pytest_runtest_setup(item: pytest.Item) -> None:
    budget = item.config.getoption("--budget")
    if budget is not None and time.monotonic() - STARTED > budget:
        pytest.skip(f"the time budget of {budget:g} seconds is spent")


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict) -> None:
    from benchmarks import timing

    machine_info["fusedops"] = timing.environment()


@pytest.fixture
def record(request: pytest.FixtureRequest):
    """Stores one row: `record(seconds of each round, name=value, ...)`."""
    from benchmarks import timing

    def store(seconds: list[float], **info) -> None:
        benchmark = request.getfixturevalue("benchmark")
        more = dict(median_ms=timing.median(seconds) * 1e3, spread=timing.spread(seconds))
        benchmark.extra_info.update({**timing.environment(), **more, **info})
        timing.replay(benchmark, seconds)
        numbers = {k: v for k, v in {**more, **info}.items() if isinstance(v, float)}
        print(f"\n{request.node.name}: " + ", ".join(f"{k} {v:.4g}" for k, v in numbers.items()))

    return store
