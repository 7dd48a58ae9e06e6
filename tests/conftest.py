"""Strict settings for every test, and what tests share."""

import os
import tempfile
from collections.abc import Iterator

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "highest")  # on a GPU it would be TF32


def pytest_configure(config: pytest.Config) -> None:
    """Compiled kernels go to a folder of this run, for subprocesses too."""
    folder = tempfile.TemporaryDirectory(prefix="fusedops-tests-")
    os.environ["FUSEDOPS_CACHE_DIR"] = folder.name
    config.add_cleanup(folder.cleanup)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and jax.default_backend() != "gpu":
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture
def interpret() -> Iterator[None]:
    """Kernels run through Triton's interpreter, on the CPU."""
    pytest.importorskip("triton")
    import fusedops

    with fusedops.interpret():
        yield
