"""GPU tests and benchmarks within a time limit: `python -m benchmarks.gpu_session [PART ...]`.

Each part runs in a process of its own with its own timeout, so that a kernel that hangs costs one part; a part
that fails does not stop the next. Tests run side by side, then the benchmarks one by one. Logs and result files
go to $OUT (default ./out), a short table is printed last. Nothing needs to be installed: run it from the root
of a checkout.

Parts, in the order given (default: gpu-tests launch attention):
  gpu-tests          every test file that has tests marked `gpu`, those tests only
  test_NAME          the tests marked `gpu` of tests/test_NAME.py
  all:test_NAME      all its tests; test_NAME::test_that or ::TestThose for some
  launch             launch cost, first call: launch.json
  quick              attention at three shapes: quick.json
  attention          attention, every shape: attention-64.json, attention-128.json, attention-256.json
  attention-DIM      one head dim of it
  sustained          attention at three shapes, under sustained load: sustained.json
"""

import argparse
import concurrent.futures
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
DEFAULT = ("gpu-tests", "launch", "attention")
HEAD_DIMS = (64, 128, 256)
CACHE = Path(tempfile.gettempdir()) / "fusedops-gpu-session"  # platformdirs may not be installed
TOGETHER = 8  # tests at the same time
WITHOUT_TIMEOUT = importlib.util.find_spec("pytest_timeout") is None


def pytest_addoption(parser: Any) -> None:
    """As a plugin, where pytest-timeout is not installed: its setting is known, and ignored."""
    if WITHOUT_TIMEOUT:
        parser.addini("timeout", "of pytest-timeout, which is not installed")


def pytest_runtest_logreport(report: Any) -> None:
    """As a plugin: says at once what failed and what took long, should the part be killed later."""
    if report.failed or report.duration > 10:
        print(f"\n{report.nodeid} {report.when}: {report.outcome}, {report.duration:.1f} s")
        print(report.longreprtext[-3000:], flush=True)


class Part(NamedTuple):
    """A pytest run: its arguments, its timeout in seconds, its result file."""

    name: str
    arguments: list[str]
    timeout: float
    results: Path | None = None


class Outcome(NamedTuple):
    part: Part
    status: str
    seconds: float
    output: str


def parts(name: str, out: Path) -> list[Part]:
    """What a name on the command line stands for."""

    def benchmark(title: str, file: str, timeout: float, *more: str) -> Part:
        results = out / f"{title}.json"
        arguments = ["-s", f"benchmarks/{file}", f"--benchmark-json={results}", *more]
        return Part(title, arguments, timeout, results)

    if name == "gpu-tests":
        files = sorted(p for p in (ROOT / "tests").glob("test_*.py") if "mark.gpu" in p.read_text())
        return [Part(p.stem, [f"tests/{p.name}", "-m", "gpu"], 180) for p in files]
    if name == "attention":
        return [part for dim in HEAD_DIMS for part in parts(f"attention-{dim}", out)]
    if name.removeprefix("attention-").isdigit():
        return [benchmark(name, "test_attention.py", 160, "-k", f"D{name.removeprefix('attention-')}-")]
    if name == "launch":
        return [benchmark(name, "test_launch.py", 200)]
    if name == "quick":
        return [benchmark(name, "test_attention.py", 120, "--quick")]
    if name == "sustained":
        return [benchmark(name, "test_attention.py", 200, "--quick", "--mode", "sustained")]
    test, only_gpu = name.removeprefix("all:"), not name.startswith("all:")
    test, _, inside = test.partition("::")
    if (ROOT / "tests" / f"{test}.py").is_file():
        arguments = [f"tests/{test}.py{inside and '::'}{inside}", *(["-m", "gpu"] if only_gpu else [])]
        return [Part(name, arguments, 180 if only_gpu else 400)]
    raise SystemExit(f"unknown part {name!r}\n\n{__doc__}")


def run(part: Part, timeout: float, log: Path) -> Outcome:
    """Runs a part with its output in the log; kills it and its children at the timeout."""
    plugin = ["-p", "benchmarks.gpu_session", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", *plugin, *part.arguments]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {"FUSEDOPS_CACHE_DIR": str(CACHE), **os.environ}
    environment |= {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    if part.results is not None:  # the result file is written at the end, so there must be one
        command.append(f"--budget={max(timeout - 40, timeout / 2):g}")
    else:  # beside others, and not for speed
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
    start = time.monotonic()
    with tempfile.TemporaryFile() as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout)
            status = {0: "ok", 5: "no tests"}.get(code, f"exit {code}")
        except subprocess.TimeoutExpired:
            status = f"killed after {timeout:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        file.seek(0)
        output = file.read().decode(errors="replace")
    outcome = Outcome(part, status, time.monotonic() - start, output)
    with log.open("a") as file:
        file.write(f"\n===== {part.name}: {' '.join(command)}\n{output}")
    print(f"{part.name}: {status}, {outcome.seconds:.1f} s, {last_line(outcome)}", flush=True)
    return outcome


def last_line(outcome: Outcome) -> str:
    """pytest's count, or the last line there is."""
    lines = [line.strip("= ") for line in outcome.output.splitlines() if line.strip()]
    counts = [
        line for line in lines if " in " in line and any(w in line for w in ("passed", "failed", "error", "skip"))
    ]
    return (counts or lines or ["no output"])[-1][:80]


def failures(outcome: Outcome) -> list[str]:
    return [line for line in outcome.output.splitlines() if line.startswith(("FAILED ", "ERROR "))]


def rows(outcome: Outcome) -> list[dict[str, Any]]:
    """The rows of a part's result file."""
    if outcome.part.results is None or not outcome.part.results.is_file():
        return []
    text = outcome.part.results.read_text()
    return [entry["extra_info"] for entry in json.loads(text)["benchmarks"]] if text else []


def launch_lines(found: list[dict[str, Any]]) -> list[str]:
    lines = []
    for row in found:
        if row["op"] == "launch":
            buffers = "with" if row["command_buffers"] else "without"
            lines.append(
                f"launch {row['variant']:<16} {buffers:<7} command buffers: {row['best_us']:6.2f} us "
                f"(kernel {row.get('kernel_us', 0):.2f}, enqueue {row['enqueue_us']:.2f})"
            )
        if row["op"] == "first call":
            lines.append(
                f"first call {row['variant']:<6} {row['process']:<6} process: lower {row['lower_seconds']:.2f} s, "
                f"compile {row['compile_seconds']:.2f} s, run {row['run_seconds']:.3f} s"
            )
    return lines


def attention_lines(found: list[dict[str, Any]]) -> list[str]:
    """One line per shape: forward / backward TFLOP/s of each variant, and the ratio to cuDNN."""
    shapes: dict[tuple, dict[tuple[str, str], dict]] = {}
    for row in found:
        if row["op"] == "attention":
            key = (row["mode"], row["H"], row["S"], row["causal"])
            shapes.setdefault(key, {})[row["variant"], row["direction"]] = row
    lines = []
    for (mode, H, S, causal), cells in shapes.items():

        def pair(variant: str, key: str, digits: int, cells: dict = cells) -> str:
            got = [cells.get((variant, d), {}).get(key) for d in ("forward", "backward")]
            return "/".join("-" if x is None else f"{x:.{digits}f}" for x in got)

        lines.append(
            f"D{H:<4}S{S:<6}{'causal' if causal else 'full':<7}{mode:<10}"
            f"fused {pair('fused', 'tflops', 0):>8}  cudnn {pair('cudnn', 'tflops', 0):>8}  "
            f"xla {pair('xla', 'tflops', 0):>8}  to cudnn {pair('fused', 'ratio_to_cudnn', 2)}"
        )
    return lines


def summary(outcomes: list[Outcome], left_out: list[str], limit: int = 60) -> str:
    lines = [f"{o.part.name:<24}{o.status:<18}{o.seconds:6.1f} s  {last_line(o)}" for o in outcomes]
    lines += [f"{name:<24}not begun: no time left" for name in left_out]
    found = [row for o in outcomes for row in rows(o)]
    numbers = launch_lines(found) + attention_lines(found)
    failed = [line[:160] for o in outcomes for line in failures(o)]
    room = max(limit - len(lines) - len(numbers) - 1, 5)
    if len(failed) > room:
        failed = [*failed[: room - 1], f"... and {len(failed) - room + 1} more"]
    return "\n".join([*failed, *numbers, *lines][-limit:])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*", default=list(DEFAULT))
    parser.add_argument("--limit", type=float, default=560, help="seconds for everything (default 560)")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    out = Path(os.environ.get("OUT") or "out").resolve()
    out.mkdir(parents=True, exist_ok=True)
    log = out / "session.log"
    left = lambda: options.limit - (time.monotonic() - start)
    waiting = [part for name in options.part for part in parts(name, out)]
    tests = [part for part in waiting if part.results is None]
    with concurrent.futures.ThreadPoolExecutor(TOGETHER) as pool:
        outcomes = list(pool.map(lambda part: run(part, min(part.timeout, left() - 5), log), tests))
    waiting = [part for part in waiting if part.results is not None]
    while waiting and left() > 20:
        outcomes.append(run(waiting[0], min(waiting.pop(0).timeout, left() - 5), log))
    text = summary(outcomes, [part.name for part in waiting])
    (out / "summary.txt").write_text(text + "\n")
    print("\n" + text)
    return int(bool(waiting) or any(o.status not in ("ok", "no tests") for o in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
