"""Plots and Markdown tables from the files that `pytest benchmarks --benchmark-json=FILE` wrote.

`benchmarks/results/<device>/*.json` are read, never written; plots and tables go beside them. The same files
give the same bytes.
"""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
NAMES = {"fused": "fusedops", "cudnn": "cuDNN (jax.nn)", "xla": "plain JAX (jax.nn)"}
STYLES = {"fused": ("#c1272d", "o"), "cudnn": ("#2e7d32", "s"), "xla": ("#1f5fa8", "^")}
PASSES = ("forward", "backward")
QUANTITIES = {  # name of the file -> passes, key of the row, label, logarithmic
    "time_forward": ("forward", "median_ms", "time of a call, ms", True),
    "time_backward": ("backward", "median_ms", "time of a call, ms", True),
    "tflops_forward": ("forward", "tflops", "TFLOP/s", False),
    "tflops_backward": ("backward", "tflops", "TFLOP/s", False),
    "memory": ("backward", "temporary_mib", "peak temporary memory, MiB", True),
}
Row = dict[str, Any]


def main(folder: str | Path = RESULTS) -> None:
    """Writes plots/*.png, attention.md and launch.md into every device's folder."""
    for device in sorted(p for p in Path(folder).iterdir() if p.is_dir()):
        found = rows(device)
        attention = [r for r in found if r.get("op") == "attention"]
        launches = [r for r in found if r.get("op") in ("launch", "first call")]
        if attention:
            _write(device / "attention.md", table(attention))
            plot([r for r in attention if r["mode"] == "burst"] or attention, device / "plots")
        if launches:
            _write(device / "launch.md", launch_table(launches))


def _write(file: Path, text: str) -> None:
    file.write_text(text)
    print(f"wrote {file}")


def rows(device: Path) -> list[Row]:
    """The rows of all files; where several files have the same row, the one of the newest run."""
    newest: dict[Any, Row] = {}
    runs = [json.loads(file.read_text()) for file in sorted(device.glob("*.json"))]
    for run in sorted(runs, key=lambda run: run.get("datetime", "")):
        for entry in run.get("benchmarks", []):
            newest[entry["fullname"], entry["extra_info"].get("mode")] = entry["extra_info"]
    return [newest[key] for key in sorted(newest, key=str)]


def _shape(row: Row) -> tuple[int, bool, int]:
    """Rows of one plot, then its points."""
    return row["H"], not row["causal"], row["S"]


def _shapes(found: list[Row]) -> dict[tuple[int, bool, int], dict[tuple[str, str], Row]]:
    """Rows by shape, and for each shape by variant and pass."""
    cells: dict[tuple[int, bool, int], dict[tuple[str, str], Row]] = {}
    for row in sorted(found, key=_shape):
        cells.setdefault(_shape(row), {})[row["variant"], row["direction"]] = row
    return cells


def _values(found: list[Row], key: str) -> str:
    """All values of a fact, in one word if they agree."""
    return ", ".join(sorted({str(row[key]) for row in found if row.get(key)}))


def _where(found: list[Row]) -> str:
    """Device, date, versions, and what a CPU's times are worth."""
    facts = ("jax", "triton", "driver", "fusedops", "commit")
    versions = ", ".join(f"{key} {_values(found, key)}" for key in facts if _values(found, key))
    note = _values(found, "note")
    return f"{_values(found, 'device')}, {_values(found, 'date')}, {versions}" + (f"; {note}" if note else "")


def _pair(cells: dict[tuple[str, str], Row], variant: str, key: str, digits: int) -> str:
    """Forward / backward of one variant; why it is missing, where the row of ours tells."""
    found = [cells.get((variant, direction), {}).get(key) for direction in PASSES]
    if any(x is not None for x in found):
        return " / ".join("-" if x is None else f"{x:.{digits}f}" for x in found)
    return cells.get(("fused", "forward"), {}).get("left_out", {}).get(variant, "-")


def table(found: list[Row]) -> str:
    """Markdown: TFLOP/s, time, ratios and memory, one line per shape, a table for each mode of timing."""
    first = found[0]
    text = (
        f"# Attention\n\n{_where(found)}.\n\n"
        f"{first['dtype']}, {first['B'] * first['S']} tokens, {first['N'] * first['H']} = heads x head dim; forward / "
        "backward, and the backward is forward and backward together less the forward. A forward counts 4 B N S S H "
        "operations, half when causal, a backward 2.5 times that. Random normal data; medians of rounds in which the "
        "candidates took turns. Memory is the peak of temporary buffers, of the forward and of both passes together.\n"
    )
    for mode in sorted({row["mode"] for row in found}):
        text += "\n" + _mode_table(mode, [row for row in found if row["mode"] == mode])
    return text


def _mode_table(mode: str, found: list[Row]) -> str:
    ceilings = [row["ceiling_tflops"] for row in found]
    spread = max(row["spread"] for row in found)
    names = [name for name in NAMES if any(row["variant"] == name for row in found)]
    others = [name for name in ("cudnn", "xla") if name in names]
    head = ["head dim", "length", "causal"]
    head += [f"{NAMES[name]}, TFLOP/s" for name in names] + ["% of matmul"]
    head += [f"times as fast as {NAMES[name]}" for name in others]
    head += [f"{NAMES[name]}, ms" for name in names] + [f"{NAMES[name]}, MiB" for name in names]
    lines = [
        f"## {mode.capitalize()}: time by {_values(found, 'clock')}, a square matmul reached "
        f"{min(ceilings):.3g} to {max(ceilings):.3g} TFLOP/s in the same runs",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
    ]
    notes = []
    for (H, full, S), cells in _shapes(found).items():
        line = [str(H), str(S), "no" if full else "yes"]
        line += [_pair(cells, name, "tflops", 0 if ceilings[0] > 50 else 3) for name in names]
        line += [_pair(cells, "fused", "percent_of_ceiling", 0)]
        line += [_pair(cells, "fused", f"ratio_to_{name}", 2) for name in others]
        line += [_pair(cells, name, "median_ms", 3) for name in names]
        line += [_pair(cells, name, "temporary_mib", 0) for name in names]
        lines.append("| " + " | ".join(line) + " |")
        for (variant, direction), row in cells.items():
            if "over_budget_of_jax_nn" in row:
                notes.append(f"{NAMES[variant]} {H}, {S}, {'no' if full else 'yes'} ({direction})")
    lines += ["", f"Rounds lie within {100 * spread:.1f}% of the median in the worst row."]
    if notes:
        lines += [
            "",
            "In these rows the gradients are further from float32 than twice those of `jax.nn`, and within twice those "
            "of plain JAX that keeps its output in half precision for the gradient: " + "; ".join(notes) + ".",
        ]
    return "\n".join(lines) + "\n"


def launch_table(found: list[Row]) -> str:
    """Markdown: microseconds per launch, and seconds of the first call."""
    text = f"# Launches\n\n{_where(found)}.\n"
    launches = [row for row in found if row["op"] == "launch"]
    if launches:
        text += (
            "\nMicroseconds per launch in a chain of 200 inside one jitted program, best of five rounds of 40 chains; "
            "of which the kernel itself, and the host's part.\n\n"
            "| kernel | command buffers | per launch, us | kernel alone, us | enqueued by the host, us |\n"
            "|---|---|---|---|---|\n"
        )
        for row in sorted(launches, key=lambda row: (row["variant"], not row["command_buffers"])):
            cells = [row["variant"], "yes" if row["command_buffers"] else "no"]
            cells += [f"{row[key]:.2f}" if key in row else "-" for key in ("best_us", "kernel_us", "enqueue_us")]
            text += "| " + " | ".join(cells) + " |\n"
    calls = [row for row in found if row["op"] == "first call"]
    if calls:
        text += (
            "\nSeconds of the first call of attention's gradient, with cold caches and in a second process.\n\n"
            "| attention | process | trace and lower | compile | run |\n|---|---|---|---|---|\n"
        )
        for row in calls:
            cells = [f"{row[key]:.2f}" for key in ("lower_seconds", "compile_seconds", "run_seconds")]
            text += f"| {NAMES[row['variant']]} | {row['process']} | " + " | ".join(cells) + " |\n"
    return text


def plot(found: list[Row], folder: Path) -> None:
    """Time, speed and memory over the sequence length: a figure each, a panel for each head dim and mask."""
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(exist_ok=True)
    for name, (direction, key, label, logarithmic) in QUANTITIES.items():
        some = [row for row in found if row["direction"] == direction and row.get(key) is not None]
        if some:
            what = "forward and backward" if name == "memory" else direction
            _figure(some, what, key, label, logarithmic, folder / f"attention_{name}.png")


def _figure(found: list[Row], what: str, key: str, label: str, logarithmic: bool, file: Path) -> None:
    import matplotlib.pyplot as plt

    panels = sorted({_shape(row)[:2] for row in found})
    columns = min(len(panels), 2)
    lines = -(-len(panels) // columns)
    style = {"font.size": 9, "figure.facecolor": "white", "axes.facecolor": "white", "text.color": "black"}
    with plt.rc_context(style):
        figure, axes = plt.subplots(
            lines, columns, figsize=(max(4.6 * columns, 6.4), 2.9 * lines + 1.1), squeeze=False, layout="constrained"
        )
        for axis, panel in zip(axes.flat, panels, strict=False):
            _panel(axis, [row for row in found if _shape(row)[:2] == panel], key, logarithmic)
            axis.set_title(f"head dim {panel[0]}, {'full' if panel[1] else 'causal'}", fontsize=10)
            axis.set_xlabel("sequence length")
            axis.set_ylabel(label)
        for axis in axes.flat[len(panels) :]:
            axis.axis("off")
        present = [name for name in NAMES if any(row["variant"] == name for row in found)]
        handles = [
            plt.Line2D([], [], color=STYLES[name][0], marker=STYLES[name][1], label=NAMES[name]) for name in present
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(present), frameon=False)
        first, note = found[0], _values(found, "note")
        figure.suptitle(
            f"Attention, {what}: {first['dtype']}, {first['B'] * first['S']} tokens, heads x head dim = "
            f"{first['N'] * first['H']}\n{_values(found, 'device')}, {_values(found, 'date')}, "
            f"jax {_values(found, 'jax')}" + (f"\n{note}" if note else ""),
            fontsize=10,
        )
        figure.savefig(file, dpi=110, metadata={"Software": None})
        plt.close(figure)
    print(f"wrote {file}")


def _panel(axis: Any, found: list[Row], key: str, logarithmic: bool) -> None:
    """Lines over the length, one for each variant; a zero has no place on a logarithmic axis and is left out."""
    for name, (color, marker) in STYLES.items():
        points = sorted((r["S"], r[key]) for r in found if r["variant"] == name and (r[key] > 0 or not logarithmic))
        if points:
            axis.plot(*zip(*points, strict=True), marker=marker, color=color, linewidth=1.8)
    lengths = sorted({row["S"] for row in found})
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [str(S) for S in lengths])
    axis.minorticks_off()
    if logarithmic:
        axis.set_yscale("log")
    else:
        axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
