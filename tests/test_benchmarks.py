"""The benchmark suite on a small scale: timing, one gated row, plots and table."""

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
    assert set(times) == {"a", "b"} and all(t > 0 for values in times.values() for t in values)
    assert timing.spread([1.0, 1.0]) == 0 and timing.median([1.0, 3.0, 2.0]) == 2
    assert timing.temporary_bytes(lambda x: (x @ x) @ x, jnp.ones((64, 64))) >= 0


def test_environment_says_what_a_cpu_is_worth():
    facts = timing.environment()
    assert facts["jax"] == jax.__version__
    if jax.default_backend() == "cpu":
        assert "no measure of a GPU" in facts["note"]


def row(H, S, causal, speed):
    variant = dict(
        forward_ms=1 / speed, backward_ms=2 / speed, forward_tflops=speed, backward_tflops=speed / 2,
        temporary_mib=S / 10,
    )  # fmt: skip
    info = dict(
        op="attention", B=16384 // S, S=S, N=2048 // H, H=H, causal=causal, ceiling_tflops=700.0, device="a device",
        date="2026-01-01", jax="0", fused=variant, xla=variant, forward_ratio_to_xla=1.0, backward_ratio_to_xla=1.0,
    )  # fmt: skip
    return {"fullname": f"attention[{H}-{S}-{causal}]", "extra_info": info}


def test_report(tmp_path):
    device = tmp_path / "a_device"
    device.mkdir()
    entries = [row(H, S, c, S / 10) for H in (64, 128) for S in (1024, 4096) for c in (True, False)]
    (device / "one.json").write_text(json.dumps({"benchmarks": entries}))
    report.main(tmp_path)
    table = (device / "attention.md").read_text()
    assert table.count("\n| 64 |") == 4 and "| 410 / 205 | - | 410 / 205 | - | 1.00 / 1.00 |" in table
    plots = {p.name: p.read_bytes() for p in (device / "plots").glob("*.png")}
    assert len(plots) == 5
    report.main(tmp_path)
    assert plots == {p.name: p.read_bytes() for p in (device / "plots").glob("*.png")}


def test_one_row(tmp_path):
    if jax.default_backend() != "cpu":
        pytest.skip("the suite itself is run on a GPU")
    out = tmp_path / "out.json"
    command = [
        sys.executable, "-m", "pytest", "benchmarks/test_attention.py", "--quick", "-q", "-p", "no:cacheprovider",
        f"--benchmark-json={out}",
    ]  # fmt: skip
    env = {**os.environ, "XLA_FLAGS": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    (entry,) = json.loads(out.read_text())["benchmarks"]
    info = entry["extra_info"]
    assert info["fused"]["forward_ms"] > 0 and info["forward_ratio_to_xla"] > 0 and "no measure" in info["note"]
