"""Plots and one Markdown table from the files that `pytest benchmarks --benchmark-json` wrote.

`benchmarks/results/<device>/*.json` are read, never written; plots and tables go beside them.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
NAMES = {"fused": "fusedops", "cudnn": "cuDNN (jax.nn)", "xla": "plain JAX (jax.nn)"}
COLORS = {"fused": "#d1495b", "cudnn": "#3a7d44", "xla": "#30638e"}


def main(folder: str | Path = RESULTS) -> None:
    """Writes plots/*.png and attention.md into every device's folder."""
    for device in sorted(p for p in Path(folder).iterdir() if p.is_dir()):
        found = list(rows(device))
        attention = [r for r in found if r.get("op") == "attention"]
        if attention:
            (device / "attention.md").write_text(table(attention))
            plot(attention, device / "plots")
            print(f"{device.name}: {len(attention)} rows, {device / 'attention.md'}, {device / 'plots'}")


def rows(device: Path) -> Iterator[dict[str, Any]]:
    """The extra_info of every benchmark, of the newest file where several have the same case."""
    newest: dict[Any, dict[str, Any]] = {}
    for file in sorted(device.glob("*.json")):
        for entry in json.loads(file.read_text()).get("benchmarks", []):
            newest[entry["fullname"]] = entry["extra_info"]
    yield from newest.values()


def _order(row: dict[str, Any]) -> tuple[int, bool, int]:
    return row["H"], not row["causal"], row["S"]


def table(found: list[dict[str, Any]]) -> str:
    """TFLOP/s forward / backward, ratios and memory, one line per shape."""
    first = found[0]
    versions = ", ".join(f"{k} {first[k]}" for k in ("jax", "triton", "driver") if first.get(k))
    lines = [
        f"Attention on {first['device']}, {first['date']}, {versions}; bf16, {first['B'] * first['S']} tokens, "
        f"{first['N'] * first['H']} = heads x head dim. TFLOP/s forward / backward; device time, candidates in turn; "
        f"a square matmul reached {first['ceiling_tflops']:.0f} TFLOP/s in the same run.",
        "",
        "| head dim | length | causal | fusedops | cuDNN | plain JAX | to cuDNN | to plain JAX "
        "| temporary MiB, fusedops / cuDNN / plain JAX |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(found, key=_order):
        cells = [str(row["H"]), str(row["S"]), "yes" if row["causal"] else "no"]
        for name in ("fused", "cudnn", "xla"):
            values = row.get(name)
            cells.append(f"{values['forward_tflops']:.0f} / {values['backward_tflops']:.0f}" if values else "-")
        for name in ("cudnn", "xla"):
            forward, backward = (row.get(f"{d}_ratio_to_{name}") for d in ("forward", "backward"))
            cells.append(f"{forward:.2f} / {backward:.2f}" if forward else "-")
        memory = (row.get(n) for n in ("fused", "cudnn", "xla"))
        cells.append(" / ".join(f"{m['temporary_mib']:.0f}" if m else "-" for m in memory))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plot(found: list[dict[str, Any]], folder: Path) -> None:
    """Time, speed and memory over the sequence length, one figure each."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(exist_ok=True)
    quantities = {
        "forward_tflops": ("forward", "TFLOP/s"),
        "backward_tflops": ("backward", "TFLOP/s"),
        "forward_ms": ("forward", "milliseconds"),
        "backward_ms": ("backward", "milliseconds"),
        "temporary_mib": ("forward and backward", "temporary memory, MiB"),
    }
    panels = sorted({(r["H"], r["causal"]) for r in found}, key=lambda p: (p[0], not p[1]))
    for quantity, (direction, unit) in quantities.items():
        columns = min(len(panels), 2)
        lines = -(-len(panels) // columns)
        figure, axes = plt.subplots(lines, columns, figsize=(5 * columns, 3.2 * lines), squeeze=False)
        for axis, (H, causal) in zip(axes.flat, panels, strict=False):
            some = sorted((r for r in found if (r["H"], r["causal"]) == (H, causal)), key=lambda r: r["S"])
            for name, label in NAMES.items():
                points = [(r["S"], r[name][quantity]) for r in some if name in r]
                if points:
                    axis.plot(*zip(*points, strict=True), marker="o", label=label, color=COLORS[name])
            axis.set_title(f"head dim {H}, {'causal' if causal else 'not causal'}", fontsize=10)
            axis.set_xscale("log", base=2)
            axis.set_xticks([r["S"] for r in some], [str(r["S"]) for r in some])
            axis.set_yscale("linear" if "tflops" in quantity else "log")
            if "tflops" in quantity:
                axis.set_ylim(bottom=0)
            axis.set_xlabel("sequence length")
            axis.set_ylabel(unit)
            axis.grid(alpha=0.3)
        for axis in axes.flat[len(panels) :]:
            axis.axis("off")
        axes.flat[0].legend(fontsize=8)
        first = found[0]
        tokens, width = first["B"] * first["S"], first["N"] * first["H"]
        figure.suptitle(
            f"Attention, {direction}: bf16, {tokens} tokens, heads x head dim = {width}\n"
            f"{first['device']}, {first['date']}, jax {first['jax']}",
            fontsize=10,
        )
        figure.tight_layout()
        figure.savefig(folder / f"attention_{quantity}.png", dpi=110, metadata={"Software": None})
        plt.close(figure)
