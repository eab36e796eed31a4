"""``jaxhetero estimate``."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxhetero.errors import ConfigError

if TYPE_CHECKING:
    from jaxhetero.simulator.estimate import Answer, Question
    from jaxhetero.simulator.goodput import Failures, Goodput

_BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class _Bytes(click.ParamType[int]):
    name = "size"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = re.fullmatch(r"([\d.]+)\s*([A-Z]*)", str(value).upper())
        if not found or found[2] not in _BYTES:
            self.fail(f"{value!r} is no size such as 1.3GB, 800MB or 64MiB", param, ctx)
        return int(float(found[1]) * _BYTES[found[2]])


class _Gbits(click.ParamType[float]):
    name = "rate"

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        # GB/s and GBps, with a large B, may well mean bytes.
        unit = r"([gm])(?:bit(?:/s)?|(?-i:b)(?:ps|/s))"
        found = re.fullmatch(rf"(\d+\.?\d*|\.\d+)\s*{unit}", str(value), re.IGNORECASE)
        if not found:
            self.fail(f"{value!r} is no rate such as 100gbit, 100gbps or 800mbit", param, ctx)
        return float(found[1]) / (1000 if found[2].lower() == "m" else 1)


@click.command("estimate")
@click.option("--setup", metavar="NAME", help="Start from a set-up by its name: p3-8+m4, p3-64+m4 or p3dn-256.")
@click.option("--workers", type=click.IntRange(min=2), help="Worker hosts.")
@click.option("--gpus-per-worker", type=click.IntRange(min=1), help="GPUs of each. [default: 1]")
@click.option("--worker-type", help="Their type in the file of prices: their price, rate and GPUs.")
@click.option("--nic", type=_Gbits(), help="The rate of a worker host's network interfaces together, as in 100gbit.")
@click.option("--gradient-bytes", type=_Bytes(), help="Of one worker on the wire, as in 1.3GB.")
@click.option("--step-ms", type=click.FloatRange(min=0), help="A step without an all-reduce between hosts.")
@click.option("--across-steps", is_flag=True, help="Hide the all-reduce under the next forward pass, too.")
@click.option("--reducer-type", multiple=True, help="A type of reducer hosts in the file of prices; may be repeated.")
@click.option("--reducers", multiple=True, type=click.IntRange(min=0), help="A number of them; may be repeated.")
@click.option("--message-us", type=click.FloatRange(min=0), help="Processor time for each message, in us. [default: 5]")
@click.option(
    "--from",
    "trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Take the step and the costs of the job that has this timeline.",
)
@click.option(
    "--failures",
    type=click.FloatRange(min=0, min_open=True),
    metavar="PER_DAY",
    help="How often a day any worker is lost: adds the share of the work that counts.",
)
@click.option("--restart-s", type=click.FloatRange(min=0), help="Until a lost worker computes again. [default: 300]")
@click.option("--checkpoint-s", type=click.FloatRange(min=0), help="A checkpoint of a fixed job. [default: 30]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--plot", type=click.Path(dir_okay=False), help="Draw step times against reducers to this file.")
def estimate_command(
    as_json: bool,
    plot: str | None,
    failures: float | None,
    restart_s: float | None,
    checkpoint_s: float | None,
    **options: Any,
) -> int:
    """Estimate steps and costs of a cluster that is not there yet.

    Example: jaxhetero estimate --workers 64 --gpus-per-worker 8 --nic 100gbit --gradient-bytes 1.3GB --step-ms 120

    Simulates a train step for several numbers of reducer hosts, and says which is best. Prices are those of
    jaxhetero/cluster/prices.toml. Takes seconds, and minutes for hundreds of workers.

    With --failures it also says which share of the work counts where workers are lost: in a job that restarts from
    checkpoints, and in an elastic one.
    """
    from jaxhetero.simulator.estimate import estimate, recommend

    question = _question(**options)
    losses = _failures(failures, restart_s=restart_s, checkpoint_s=checkpoint_s)
    click.echo(f"simulating train steps of {question.workers} workers ...", err=True)
    answers = estimate(question)
    best = recommend(answers)
    left = None if losses is None else _goodput(losses, question, best)
    if as_json:
        found = {"answers": [asdict(answer) for answer in answers], "recommended": asdict(best)}
        click.echo(json.dumps(found | ({"goodput": asdict(left)} if left else {}), indent=1))
    else:
        _show(question, answers, best)
        if losses and left:
            _show_goodput(losses, left)
    if plot:
        _draw(plot, answers)
    return 0


def _question(
    *,
    setup: str | None,
    worker_type: str | None,
    nic: float | None,
    step_ms: float | None,
    message_us: float | None,
    trace: Path | None,
    **given: Any,
) -> Question:
    from jaxhetero.cluster.prices import read_prices
    from jaxhetero.simulator import Costs
    from jaxhetero.simulator.estimate import SETUPS, Question

    if setup is not None and setup not in SETUPS:
        raise ConfigError(f"--setup {setup}: there are {', '.join(SETUPS)}")
    found: dict[str, Any] = dict(SETUPS[setup]) if setup else {}
    worker_type = worker_type or found.pop("worker_type", None)
    found.pop("worker_type", None)
    if worker_type:
        prices = read_prices()
        if worker_type not in prices:
            raise ConfigError(f"--worker-type {worker_type}: there are {', '.join(prices)}")
        instance = prices[worker_type]
        found |= {"worker_usd_per_hour": instance.usd_per_hour, "worker_gbits": instance.nic_gbits}
        found |= {"gpus_per_worker": max(1, instance.accelerator_count)}
    if trace:
        if step_ms is not None or given["gradient_bytes"] is not None:
            raise ConfigError("--from has the step: give no --gradient-bytes and no --step-ms")
        found |= _recorded(trace)
    found |= {"worker_gbits": nic} if nic is not None else {}
    found |= {"step_s": step_ms / 1000} if step_ms is not None else {}
    if message_us is not None:
        found["costs"] = replace(found.get("costs", Costs()), s_per_message=message_us / 1e6)
    names = {"reducer_type": "reducer_types", "reducers": "reducer_counts"}
    found |= {names.get(name, name): value for name, value in given.items() if value not in (None, ())}
    options = {
        "workers": "--workers",
        "worker_gbits": "--nic",
        "gradient_bytes": "--gradient-bytes",
        "step_s": "--step-ms",
    }
    if missing := [option for name, option in options.items() if name not in found]:
        raise ConfigError(f"missing {', '.join(missing)}; or start from a --setup")
    return Question(**found)


def _recorded(trace: Path) -> dict[str, Any]:
    from jaxhetero.simulator.recorded import read_step

    step = read_step(trace)
    text = (
        f"{trace.name}: {step.worker_count} workers, {step.step_count} steps of {1e3 * step.step_s:.1f} ms without "
        f"waiting for rounds, {step.gradient_bytes / 1e6:.1f} MB in {len(step.buckets)} buckets; "
    )
    if step.costs is None:
        text += "costs were not measured"
    else:
        costs = step.costs
        text += f"a message costs {1e6 * costs.s_per_message:.1f} us, a GB {costs.s_per_gb:.2f} s"
    click.echo(text, err=True)
    found: dict[str, Any] = {"gradient_bytes": step.gradient_bytes, "step_s": step.step_s, "buckets": step.buckets}
    if step.worker_count >= 2:
        found["workers"] = step.worker_count
    return found | ({"costs": step.costs} if step.costs else {})


def _show(question: Question, answers: list[Answer], best: Answer) -> None:
    click.echo(f"{question.workers} workers with {question.workers * question.gpus_per_worker} GPUs, simulated:")
    _show_steps(question, [(answer, answer.step_s) for answer in answers])
    across = [(answer, answer.across_step_s) for answer in answers if answer.across_step_s is not None]
    if across:
        click.echo("with --across-steps, so under the next forward pass as well:")
        _show_steps(question, across)
    click.echo(
        f"recommended: {f'{best.reducer_count} {best.reducer_type}' if best.reducer_count else 'no reducer hosts'}"
    )


def _show_steps(question: Question, steps: list[tuple[Answer, float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from jaxhetero.config import colour_wanted

    table = Table(box=None)
    for name in ("reducers", "type", "step, ms", "efficiency", "exposed", "USD/h", "USD/1k steps"):
        table.add_column(name, justify="left" if name == "type" else "right", no_wrap=True)
    for answer, step_s in steps:
        hourly = answer.usd_per_hour
        table.add_row(
            str(answer.reducer_count),
            answer.reducer_type or "in workers",
            f"{1e3 * step_s:.1f}",
            f"{100 * question.step_s / step_s:.1f} %",
            f"{1e3 * (step_s - question.step_s):.1f}",
            "-" if hourly is None else f"{hourly:.2f}",
            "-" if hourly is None else f"{1e3 * hourly / 3600 * step_s:.2f}",
        )
    Console(no_color=not colour_wanted()).print(table)


def _failures(per_day: float | None, **times: float | None) -> Failures | None:
    from jaxhetero.simulator.goodput import Failures

    given = {name: value for name, value in times.items() if value is not None}
    if per_day is not None:
        return Failures(per_day, **given)
    if given:
        raise ConfigError("--restart-s and --checkpoint-s are for --failures; give that, too")
    return None


def _goodput(failures: Failures, question: Question, best: Answer) -> Goodput:
    from jaxhetero.simulator.goodput import goodput

    return goodput(
        failures,
        workers=question.workers,
        step_s=best.fastest_step_s,
        gradient_bytes=question.gradient_bytes,
        worker_gbits=question.worker_gbits,
    )


def _show_goodput(failures: Failures, left: Goodput) -> None:
    click.echo(
        f"with {failures.per_day:g} failures a day, and {failures.restart_s:g} s until a lost worker is back:\n"
        f"  a fixed job with a checkpoint of {failures.checkpoint_s:g} s every {left.checkpoint_every_s / 60:.0f} min: "
        f"{left.fixed:.1%} of its work counts\n"
        f"  an elastic job: {left.elastic:.1%}"
    )


def _draw(path: str, answers: list[Answer]) -> None:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from error
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for kind in dict.fromkeys(answer.reducer_type for answer in answers if answer.reducer_type):
        own = [answer for answer in answers if answer.reducer_type in ("", kind)]
        axes.plot([a.reducer_count for a in own], [1e3 * a.step_s for a in own], marker="o", label=kind)
    axes.set(xlabel="reducer hosts", ylabel="step, ms", title="simulated train step")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
