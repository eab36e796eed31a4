"""Draws the tables of bench.simulate.scaling."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxhetero import best_time_s

Line = list[str]

# Of whole clusters, with accelerators of then; by the number of hosts with eight V100 each.
_PUBLISHED = (
    ("published: ResNet-50, MXNet", 8, 92),
    ("published: ResNet-50, TensorFlow", 8, 90),
    ("published: BERT-large", 256, 85),
)


def draw(path: Path, name: str, lines: list[Line]) -> None:
    """Draw the table of this name, its heads first, as far as there is a figure of it."""
    if name in _DRAW:
        with _axes(path) as axes:
            _DRAW[name](axes, *lines)


@contextmanager
def _axes(path: Path) -> Iterator[Any]:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    yield axes
    axes.set_title("simulated, not measured")
    if axes.get_yscale() == "linear":
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _number(cell: str) -> float:
    return float(cell.rstrip(" %")) if cell != "-" else float("nan")


def _plot_columns(axes: Any, xs: list[float], heads: Line, rows: tuple[Line, ...], first: int) -> None:
    for column, name in enumerate(heads[first:], start=first):
        axes.plot(xs, [_number(row[column]) for row in rows], "o-", label=name)


def _over_workers(axes: Any, rows: tuple[Line, ...]) -> list[float]:
    counts = [float(row[0]) for row in rows]
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [row[0] for row in rows])
    axes.set_xlabel("workers")
    return counts


def _algorithms(axes: Any, heads: Line, *rows: Line) -> None:
    counts = _over_workers(axes, rows)
    _plot_columns(axes, counts, heads, rows, 1)
    for index, share in enumerate((1.0, 0.5, 0.0)):  # the columns of ours, in their order and colours
        limits = [best_time_s(1, [1.0] * int(count), [1.0] * int(count * share)) for count in counts]
        axes.plot(counts, limits, ":", color=f"C{index}")
    axes.plot([], [], "k:", label="best possible")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("time of an all-reduce, S/B")


def _models(axes: Any, heads: Line, *rows: Line) -> None:
    counts = _over_workers(axes, rows)
    for column, name in enumerate(heads[1:], start=1):
        style = "o:" if "free" in name else "o-"
        axes.plot(counts, [_number(row[column]) for row in rows], style, color=f"C{(column - 1) // 2}", label=name)
    for (label, hosts, percent), marker in zip(_PUBLISHED, "^vs", strict=True):
        axes.plot([hosts], [percent], marker, color="black", label=label)
    axes.axhline(100, color="black", linestyle=":", label="limit")
    axes.set(xlabel="hosts", ylabel="efficiency of a train step, %")


def _servers(axes: Any, heads: Line, *rows: Line) -> None:
    for index, model in enumerate(dict.fromkeys(row[0] for row in rows)):
        own = [row for row in rows if row[0] == model]
        shares = [float(row[1]) for row in own]
        for column, style in ((2, "s--"), (3, "o-"), (4, "^:")):
            values = [_number(row[column]) for row in own]
            axes.plot(shares, values, style, color=f"C{index}", label=f"{model}, {heads[column]}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(shares, [f"{share:g}" for share in shares])
    axes.set(xlabel="servers or reducers for each worker", ylabel="time of an all-reduce, S/B")


def _leaves(axes: Any, heads: Line, *rows: Line) -> None:
    _plot_columns(axes, [float(row[1].partition("/")[2]) for row in rows], heads, rows, 2)
    axes.set(xlabel="oversubscription: hosts of a leaf / its links", ylabel="time of an all-reduce, S/B")


def _costs(axes: Any, heads: Line, *rows: Line) -> None:
    del heads
    for setup in dict.fromkeys(row[0] for row in rows):
        own = [row for row in rows if row[0] == setup]
        usd = [_number(row[-1]) for row in own]
        axes.plot([_number(row[2]) for row in own], [value / usd[0] for value in usd], "o-", label=setup)
    axes.axhline(1, color="black", linestyle=":", label="without reducer hosts")
    axes.set(xlabel="reducer hosts for each worker", ylabel="cost of a step / cost without reducer hosts")


_DRAW = {"algorithms": _algorithms, "models": _models, "servers": _servers, "leaves": _leaves, "costs": _costs}
