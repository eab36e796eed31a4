"""The plot of size against time for every engine, with the best possible time."""

from __future__ import annotations

from pathlib import Path

from bench.engines.specs import format_size
from bench.harness.job import Conditions
from bench.harness.report import Row


def write_plot(path: Path, rows: list[Row], conditions: Conditions, title: str) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for engine in dict.fromkeys(row.engine for row in rows):
        own = [row for row in rows if row.engine == engine]
        axes.plot([row.bytes for row in own], [row.median_s * 1e3 for row in own], marker="o", label=engine)
    sizes = sorted({row.bytes for row in rows})
    limits = [conditions.limit_s(size) * 1e3 for size in sizes]
    axes.plot(sizes, limits, color="black", linestyle="--", label=f"limit: {conditions.best_factor:.2f} S/B")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [format_size(size) for size in sizes])
    axes.set_yscale("log")
    # The best possible time of a few bytes is far below any measured time.
    axes.set_ylim(bottom=min(row.median_s for row in rows) * 1e3 / 4)
    axes.set(xlabel="payload S of each worker", ylabel="median time, ms", title=title)
    axes.grid(which="major", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
