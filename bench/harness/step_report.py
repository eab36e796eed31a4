"""The figures of train steps as rows, as a table, and as a plot of workers against efficiency."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.harness.report import format_columns, number

_COLUMNS = "workers reducers engine buckets compute_ms network_ms step_ms exposed_ms overlap efficiency best ring wrong"


@dataclass(frozen=True)
class Row:
    """The figures of one engine with one number of workers. ``bench.train_step`` explains them."""

    worker_count: int
    reducer_count: int
    colocated_count: int
    engine: str
    bucket_count: int
    compute_s: float
    network_s: float
    step_s: float
    exposed_s: float
    overlap: float | None
    efficiency: float
    best_efficiency: float
    ring_efficiency: float
    wrong_count: int
    times_s: dict[str, list[float]]


def format_table(rows: list[Row]) -> str:
    lines = [_COLUMNS.split()]
    for row in rows:
        reducers = f"{row.reducer_count}+{row.colocated_count}" if row.colocated_count else str(row.reducer_count)
        times = (f"{time * 1e3:.1f}" for time in (row.compute_s, row.network_s, row.step_s, row.exposed_s))
        shares = map(number, (row.overlap, row.efficiency, row.best_efficiency, row.ring_efficiency))
        lines.append(
            [str(row.worker_count), reducers, row.engine, str(row.bucket_count), *times, *shares, str(row.wrong_count)]
        )
    return format_columns(lines)


def write_plot(path: Path, rows: list[Row], title: str) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for engine in dict.fromkeys(row.engine for row in rows):
        own = [row for row in rows if row.engine == engine]
        axes.plot([row.worker_count for row in own], [row.efficiency for row in own], marker="o", label=engine)
    first = [row for row in rows if row.engine == rows[0].engine]
    for label, name, style in (("best possible", "best_efficiency", "--"), ("ideal ring", "ring_efficiency", ":")):
        values = [getattr(row, name) for row in first]
        axes.plot([row.worker_count for row in first], values, color="black", linestyle=style, label=label)
    axes.set(xlabel="workers", ylabel="scaling efficiency, t1/tn", title=title, ylim=(0, 1.05))
    axes.set_xticks([row.worker_count for row in first])
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
