"""The demonstration's picture: both loss curves, the failure marked, and their difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.demo_report import Kill, RunRecord, Swap

PEACE = "#9ecae1"
FAILURE = "#08306b"
LOSS_OF_NODE = "#cb181d"


def draw(peace: RunRecord, failure: RunRecord, identical: bool, file: Path) -> None:
    """Write a PNG. Needs matplotlib, and no display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (upper, lower) = pyplot.subplots(
        2, 1, figsize=(9, 6), sharex=True, height_ratios=(4, 1), layout="constrained"
    )
    _draw_curves(upper, peace, failure)
    _draw_difference(lower, peace, failure)
    for kill in failure.kills:
        for axes in (upper, lower):
            axes.axvline(
                kill.iteration, color=LOSS_OF_NODE, linewidth=1.2, linestyle=(0, (4, 2)), zorder=1
            )
    for kill, swap in zip(failure.kills, failure.swaps, strict=False):
        upper.annotate(
            _story(kill, swap),
            xy=(kill.iteration, 0.92),
            xycoords=("data", "axes fraction"),
            xytext=(8, 0),
            textcoords="offset points",
            verticalalignment="top",
            color=LOSS_OF_NODE,
        )
    figure.suptitle(
        "Losses with and without a lost node: "
        + ("the same in every bit" if identical else "THEY DIFFER"),
        fontweight="bold",
    )
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def _story(kill: Kill, swap: Swap) -> str:
    spares = " and ".join(map(str, swap.spares_used))
    again = {0: "no completed iteration", 1: "1 completed iteration"}.get(
        swap.iterations_rerun, f"{swap.iterations_rerun} completed iterations"
    )
    return (
        f"node {kill.node} killed in iteration {kill.iteration} ({kill.phase})\n"
        f"spare node {spares} in its place, next step done after {swap.seconds['total']:.2f} s\n"
        f"{again} run again"
    )


def _draw_curves(axes: Any, peace: RunRecord, failure: RunRecord) -> None:
    axes.plot(
        list(peace.losses),
        [loss.value for loss in peace.losses.values()],
        color=PEACE,
        linewidth=6,
        solid_capstyle="round",
        label="in peace",
    )
    axes.plot(
        list(failure.losses),
        [loss.value for loss in failure.losses.values()],
        color=FAILURE,
        linewidth=1.2,
        marker="o",
        markersize=3,
        label="with a node killed",
    )
    axes.set_ylabel("training loss (nats per byte)")
    axes.legend(loc="lower left", frameon=False)
    _strip(axes)


def _draw_difference(axes: Any, peace: RunRecord, failure: RunRecord) -> None:
    both = [iteration for iteration in peace.losses if iteration in failure.losses]
    gaps = [failure.losses[i].value - peace.losses[i].value for i in both]
    axes.plot(both, gaps, color=FAILURE, linewidth=1.2, marker="o", markersize=3)
    if not any(gaps):
        axes.set_ylim(-1, 1)
        axes.set_yticks([0])
    axes.set_ylabel("difference")
    axes.set_xlabel("iteration")
    axes.xaxis.get_major_locator().set_params(integer=True)
    _strip(axes)


def _strip(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
