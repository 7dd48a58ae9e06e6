"""The benchmark suite on a small scale: timing, gated rows, plots and tables."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("matplotlib")
from benchmarks import report, timing

ROOT = Path(__file__).parents[1]


def test_timing():
    f = functools.partial(jax.jit(lambda x: x @ x), jnp.ones((64, 64)))
    times = timing.compare({"a": f, "b": f}, rounds=2)
    assert set(times) == {"a", "b"} and all(s > 0 for found in times.values() for s in found.seconds)
    assert timing.spread([1.0, 1.0]) == 0 and timing.median([1.0, 3.0, 2.0]) == 2
    with pytest.raises(ValueError, match="mode must be one of"):
        timing.compare({"a": f}, mode="warm")


def test_environment_says_what_a_cpu_is_worth():
    facts = timing.environment()
    assert facts["jax"] == jax.__version__
    if jax.default_backend() == "cpu":
        assert "no measure of a GPU" in facts["note"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Two real rows of each variant, from a small run of the suite on this machine."""
    if jax.default_backend() != "cpu":
        pytest.skip("the suite itself is run on a GPU")
    folder = tmp_path_factory.mktemp("results") / "cpu"
    folder.mkdir()
    command = [
        sys.executable, "-m", "pytest", "benchmarks/test_attention.py", "--quick", "-q", "-p", "no:cacheprovider",
        f"--benchmark-json={folder / 'one.json'}",
    ]  # fmt: skip
    env = {**os.environ, "XLA_FLAGS": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_rows(results):
    rows = [entry["extra_info"] for entry in json.loads((results / "one.json").read_text())["benchmarks"]]
    assert {(r["variant"], r["direction"]) for r in rows} == {
        (v, d) for v in ("fused", "xla") for d in ("forward", "backward")
    }
    for row in rows:
        assert row["tflops"] > 0 and row["percent_of_ceiling"] > 0 and "no measure" in row["note"]
        assert row["variant"] == "xla" or row["ratio_to_xla"] > 0


def test_report(results):
    report.main(results.parent)
    table = (results / "attention.md").read_text()
    assert "fusedops" in table and "plain JAX" in table and "no measure of a GPU" in table
    plots = {p.name: p.read_bytes() for p in (results / "plots").glob("*.png")}
    assert len(plots) == len(report.QUANTITIES)
    report.main(results.parent)
    assert plots == {p.name: p.read_bytes() for p in (results / "plots").glob("*.png")}


def test_a_wrong_result_has_no_speed():
    """The gate refuses what is over the error budget."""
    from benchmarks import test_attention as suite

    case = suite.Case(64, 128, True)
    arrays = suite.inputs(case)
    plain = functools.partial(suite.forward_and_backward, suite.variants(True)["xla"])
    right = plain(*arrays)
    wrong, _ = suite.check({"xla": right}, case, *arrays)
    assert not wrong
    wrong, _ = suite.check({"xla": (right[0] * 1.1, *right[1:])}, case, *arrays)
    assert "xla" in wrong
