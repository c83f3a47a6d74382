"""Draws what percentage of the GPUs each policy allocates as pods arrive, with one curve for each policy.

matplotlib is an optional dependency (`mgpu[plot]`), so only the functions import it. `openb_command` calls this module.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mgpu.model.errors import BadObject, Problem

SUFFIXES = (".png", ".svg")
_SHOWN = (80, 130)  # the range of the x axis, in percent of the cluster's GPUs
_STYLE: Mapping[str, dict[str, Any]] = {
    "fragmentation": {"color": "#c2410c", "linewidth": 2.4, "zorder": 4},
    "fragmentation-known": {"color": "#fb923c", "linestyle": (0, (4, 2)), "zorder": 3},
    "fgd": {"color": "#1d4ed8", "linewidth": 2.0, "zorder": 3},
    "binpack": {"color": "#0f766e"},
    "bestfit": {"color": "#7c3aed"},
    "spread": {"color": "#a16207"},
    "random": {"color": "#6b7280"},
}


def check(file: Path) -> None:
    """Raise BadObject if the suffix is not one of SUFFIXES, the directory is missing, or matplotlib is not installed.

    The experiment takes long, so `openb_command` calls this function before it.
    """
    if file.suffix not in SUFFIXES:
        raise BadObject([Problem(f"--plot {file}", f"must end in {' or '.join(SUFFIXES)}")])
    if not file.parent.is_dir():
        raise BadObject([Problem(f"--plot {file}", f"{file.parent} is not a directory")])
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        missing = "needs matplotlib, which is not installed: pip install 'mgpu[plot]'"
        raise BadObject([Problem("--plot", missing)]) from error


def draw(file: Path, curves: Mapping[str, Mapping[int, float]], subtitle: str) -> None:
    """Write the picture. Raises BadObject if the file cannot be written.

    Args:
        file: The file, whose suffix determines the format.
        curves: The mean curve of each policy (`openb_command.mean_curves`).
        subtitle: The text below the title.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.6), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(_SHOWN, _SHOWN, color="#9ca3af", linewidth=1, linestyle=(0, (2, 2)), label="all that arrived")
    heights = []
    for policy, curve in curves.items():
        points = [(x, y) for x, y in curve.items() if _SHOWN[0] <= x <= _SHOWN[1]]
        if points:
            heights += [y for _, y in points]
            label = f"{policy}  {points[-1][1]:.2f}"
            axes.plot(*zip(*points, strict=True), label=label, **{"linewidth": 1.6, **_STYLE.get(policy, {})})
    axes.set_xlim(*_SHOWN)
    if heights:
        axes.set_ylim(min(heights) - 0.5, max(heights) + 1.2)
    axes.set_title("GPUs allocated as pods arrive", loc="left", fontsize=13, fontweight="bold", pad=22)
    axes.text(0, 1.02, subtitle, transform=axes.transAxes, color="#6b7280", fontsize=9)
    axes.set_xlabel("GPUs requested by the pods that arrived, % of the cluster")
    axes.set_ylabel("GPUs allocated, % of the cluster")
    axes.grid(color="#e5e7eb", linewidth=0.8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False, fontsize=9)
    try:
        figure.savefig(file)
    except OSError as error:
        raise BadObject([Problem(f"--plot {file}", f"cannot be written: {error.strerror}")]) from error
