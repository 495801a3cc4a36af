"""What the scripts that draw share: matplotlib, and the way from a benchmark's record to its picture."""

import argparse
import json
import pathlib
import sys

SCRIPT = pathlib.Path(sys.argv[0]).name

try:
    import matplotlib
except ImportError:
    sys.exit(f"{SCRIPT}: no matplotlib; install python3-matplotlib, or `pip install matplotlib` into this Python")
matplotlib.use("svg")
# Text stays text in the SVG: searchable, small, in the reader's font. With a fixed salt equal runs give equal files.
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "hypermla", "font.size": 9, "axes.grid": True,
                            "grid.alpha": 0.3, "axes.axisbelow": True})
from matplotlib import pyplot, ticker  # noqa: E402, F401


def plain_numbers(*directions):
    """Logarithmic axes with labels such as 200 instead of 2 x 10^2."""
    for axis in directions:
        for set_formatter in (axis.set_major_formatter, axis.set_minor_formatter):
            set_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "125" else ""))


def save(figure, to, **how):
    figure.savefig(to, format="svg", bbox_inches="tight", metadata={"Date": None}, **how)


def draw_record(description, kind, choose, draw, nothing):
    """A script's command line: draws the record of bench_<kind>.py as SVG. choose(record): what of it; draw(record,
    chosen): the figure; nothing: what the user reads where nothing is chosen."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("record", help=f"what bench_{kind}.py --record wrote")
    parser.add_argument("picture", help="the SVG to write")
    arguments = parser.parse_args()
    try:
        record = json.loads(pathlib.Path(arguments.record).read_text())
        if record["kind"] != kind:
            raise KeyError("kind")
        chosen = choose(record)
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"{SCRIPT}: {arguments.record} is no record of bench_{kind}.py ({error!r}); make one with --record")
    if not chosen:
        sys.exit(f"{SCRIPT}: {arguments.record} holds {nothing}")
    figure = draw(record, chosen)
    pathlib.Path(arguments.picture).parent.mkdir(parents=True, exist_ok=True)
    save(figure, arguments.picture, facecolor="white")
    print(arguments.picture)
