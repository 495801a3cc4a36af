#!/usr/bin/env python3
"""Pictures of profiles, and a report that needs nothing but a browser.

    scripts/plot_profile.py RUN [RUN ...]

A run is a directory below out/profiles. Each gets roofline.svg, stages.svg, tuning-<stage>.svg where the tuner
measured, and report.html with everything inside. Runs at two or more values of s also get crossover.svg.

Needs matplotlib (Debian: python3-matplotlib), for log axes, heat maps and SVG whose text stays text; gnuplot would need
a script per picture and cannot read JSON.
"""

import argparse
import html
import io
import json
import pathlib
import re
import statistics
import sys

from pictures import plain_numbers, pyplot, save, ticker


class Run:
    def __init__(self, directory):
        self.directory = pathlib.Path(directory)
        try:
            self.profile = json.loads((self.directory / "profile.json").read_text())
            self.stages = self.profile["stages"]
        except (OSError, ValueError, KeyError) as error:
            sys.exit(f"plot_profile.py: {directory} is no run ({error}); give a directory below out/profiles")

    def time_us(self, stage):
        """The time of the stage alone if it was measured, else of the whole run."""
        if "burst" in stage:
            return stage["burst"]["median_us"]
        if len(self.stages) == 1:
            timing = self.profile["timing"]
            return timing.get("burst", timing["cold"])["median_us"]
        return None


def svg_of(figure):
    text = io.StringIO()
    save(figure, text)
    pyplot.close(figure)
    text = text.getvalue()
    return text[text.index("<svg"):]  # without the XML head, so that HTML can hold it


def roofline(run):
    """Stages under the ceilings: specified ones solid, those measured on this device dashed."""
    limits = run.profile["roofline"]
    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    points = []
    for stage in run.stages:
        seconds = (run.time_us(stage) or 0) * 1e-6
        if seconds and stage["flops"]:
            points.append((stage["flops"] / stage["bytes"], stage["flops"] / seconds * 1e-12, stage))
    ridge = limits["ridge"]
    low = min([ridge, *(x for x, _, _ in points)]) / 8
    high = max([ridge, *(x for x, _, _ in points)]) * 8

    def ceiling(tflops, gbps, label, **style):
        corner = tflops * 1e3 / gbps
        axes.plot([low, min(max(corner, low), high), high], [gbps * low * 1e-3, tflops, tflops], label=label, **style)

    peak = limits["peak_tflops"]
    ceiling(peak, limits["peak_gbps"], f"specified: {peak:.4g} TFLOP/s, {limits['peak_gbps']:g} GB/s", color="black")
    axes.annotate(f"{peak:.4g} TFLOP/s", (high, peak), (0, 3), textcoords="offset points", ha="right", fontsize=7)
    bandwidth = limits.get("read_GBps", limits["peak_gbps"])
    for key, colour in (("matmul_burst_tflops", "tab:blue"), ("matmul_sustained_tflops", "tab:orange")):
        if key in limits:
            ceiling(limits[key], bandwidth,
                    f"measured, {key.split('_')[1]}: {limits[key]:.4g} TFLOP/s, {bandwidth:.4g} GB/s",
                    color=colour, linestyle="--")
    for i, (x, y, stage) in enumerate(points):
        colour = f"C{i + 2}"
        axes.plot(x, y, "o", color=colour, label=f"{stage['name']}: {y:.3g} TFLOP/s")
        traffic = stage.get("signals", {}).get("dram_bytes")
        if traffic:  # where the stage stands by the bytes that DRAM really moved
            axes.plot(stage["flops"] / traffic, y, "o", markerfacecolor="none", color=colour)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte (hollow: by the DRAM traffic measured)",
             ylabel="TFLOP/s", title=f"{run.profile['kernel']} on {run.profile['device']['name']}")
    measured = [limits[key] for key in ("matmul_burst_tflops", "matmul_sustained_tflops") if key in limits]
    axes.set_ylim(bottom=axes.get_ylim()[0] / 2, top=2.5 * max([peak, *measured]))
    plain_numbers(axes.xaxis, axes.yaxis)
    axes.legend(fontsize=7, loc="lower right")
    return svg_of(figure)


def stages(run):
    """What ran when, from the timeline where there is one; else each stage's time over its prediction."""
    trace = run.directory / "chrome_trace.json"
    if trace.exists():
        events = json.loads(trace.read_text())["traceEvents"]
        kernels = [event for event in events if event["ph"] == "X" and event["cat"] in ("kernel", "memory")]
        streams = sorted({event["tid"] for event in kernels})
        names = sorted({event["name"] for event in kernels})
        begin = min(event["ts"] for event in kernels)
        counters = {}
        for event in events:
            if event["ph"] == "C":
                counters.setdefault(event["name"], []).append((event["ts"] - begin, *event["args"].values()))
        heights = [0.5 * len(streams)] + [1.2] * bool(counters)
        figure, grid = pyplot.subplots(len(heights), 1, figsize=(7, 1.2 + sum(heights)), sharex=True, squeeze=False,
                                       gridspec_kw={"height_ratios": heights})
        axes = grid[0, 0]
        for number, (name, points) in enumerate(counters.items()):
            grid[1, 0].step(*zip(*points), where="post", linewidth=0.7, color=("black", "tab:red")[number % 2],
                            label=name)
        if counters:
            grid[1, 0].set(ylabel="% of peak", ylim=(0, 100))
            grid[1, 0].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1))
        for number, name in enumerate(names):
            for row, stream in enumerate(streams):
                bars = [(event["ts"] - begin, event["dur"]) for event in kernels
                        if (event["name"], event["tid"]) == (name, stream)]
                if bars:
                    axes.broken_barh(bars, (row - 0.4, 0.8), color=f"C{number}", label=name)
        handles, labels = axes.get_legend_handles_labels()
        first = dict(zip(labels, handles))
        axes.legend(first.values(), first.keys(), fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1))
        axes.set(yticks=range(len(streams)), yticklabels=[f"stream {stream}" for stream in streams])
        grid[-1, 0].set_xlabel("us")
        axes.set_title("timeline")
    else:
        bars = [stage for stage in run.stages if "group" not in stage]  # kernels that run at once are one bar
        figure, axes = pyplot.subplots(figsize=(7, 1.2 + 0.5 * len(bars)))
        for row, stage in enumerate(bars):
            time = run.time_us(stage) or 0
            axes.barh(row, time, height=0.7, color="tab:blue", label="measured" if row == 0 else None)
            axes.barh(row, stage["predicted_us"], height=0.3, color="tab:orange",
                      label="roofline" if row == 0 else None)
        axes.set(xlabel="us", yticks=range(len(bars)), yticklabels=[stage["name"] for stage in bars])
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1))
        axes.set_title("stages, each by itself, against the roofline")
    axes.invert_yaxis()
    return svg_of(figure)


def tuning(name, history):
    """The best time over the two tiling fields that were varied most; null when there are no two."""
    measured = [(one["tiling"], statistics.median(one["seconds"]) * 1e6) for one in history if one.get("seconds")]
    values = {field: sorted({tiling[field] for tiling, _ in measured})
              for field in (measured[0][0] if measured else {})}
    fields = sorted(values, key=lambda field: -len(values[field]))[:2]
    if len(fields) < 2 or len(values[fields[1]]) < 2:
        return None
    x, y = fields
    grid = [[min((time for tiling, time in measured if (tiling[x], tiling[y]) == (a, b)), default=float("nan"))
             for a in values[x]] for b in values[y]]
    figure, axes = pyplot.subplots(figsize=(1.5 + 0.8 * len(values[x]), 1.3 + 0.5 * len(values[y])))
    picture = axes.imshow(grid, cmap="viridis_r", aspect="auto")
    for row, times in enumerate(grid):
        for column, time in enumerate(times):
            axes.text(column, row, "-" if time != time else f"{time:.4g}", ha="center", va="center", fontsize=7,
                      bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1})
    axes.set(xlabel=x, ylabel=y, xticks=range(len(values[x])), xticklabels=values[x], yticks=range(len(values[y])),
             yticklabels=values[y], title=f"{name}: best us of {len(measured)} tilings")
    axes.grid(False)
    figure.colorbar(picture, label="us")
    return svg_of(figure)


def crossover(runs):
    """Time over s for every kernel, measured and predicted; null for runs of a single s or of different shapes."""
    lines = {}
    for run in runs:
        if "s" in run.profile["problem"]:
            lines.setdefault(run.profile["kernel"], []).append(
                (run.profile["problem"]["s"], run.profile["timing"]["cold"]["median_us"],
                 run.profile["roofline"]["predicted_us"]))
    shapes = {json.dumps({key: run.profile["problem"].get(key) for key in ("b", "t", "h", "dtype")}) for run in runs}
    if len({s for points in lines.values() for s, _, _ in points}) < 2 or len(shapes) > 1:
        return None
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for number, (kernel, points) in enumerate(sorted(lines.items())):
        s, measured, predicted = zip(*sorted(points))
        axes.plot(s, measured, "o-", color=f"C{number}", label=kernel)
        axes.plot(s, predicted, ":", color=f"C{number}")
    axes.set(xscale="log", yscale="log", xlabel="queries per request, s", ylabel="us (dotted: roofline)",
             title="crossover: " + ", ".join(f"{key}={value}" for key, value in json.loads(shapes.pop()).items()))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    plain_numbers(axes.yaxis)
    axes.legend(fontsize=7)
    return svg_of(figure)


def inline(text):
    text = html.escape(text, quote=False)
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", text))


def markdown(text):
    """Converts the Markdown of reports: headings, paragraphs, numbered lists, tables."""
    result = []
    for block in re.split(r"\n\s*\n", text.strip()):
        lines = block.splitlines()
        heading = re.match(r"(#+) (.*)", lines[0])
        if heading:
            result.append(f"<h{len(heading[1])}>{inline(heading[2])}</h{len(heading[1])}>")
            lines = lines[1:]
        if not lines:
            continue
        if lines[0].startswith("|"):
            rows = [[inline(cell.strip()) for cell in line.strip().strip("|").split("|")] for line in lines]
            body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>\n" for row in rows[2:])
            result.append("<table><thead><tr>" + "".join(f"<th>{cell}</th>" for cell in rows[0])
                          + f"</tr></thead>\n<tbody>{body}</tbody></table>")
        elif all(re.match(r"\d+\. ", line) for line in lines):
            result.append("<ol>" + "".join(f"<li>{inline(line.split('. ', 1)[1])}</li>" for line in lines) + "</ol>")
        else:
            result.append(f"<p>{inline(' '.join(lines))}</p>")
    return "\n".join(result)


PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
table {{ border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }}
th, td {{ border: 1px solid #ccc; padding: .2rem .6rem; text-align: left; }} th {{ background: #f2f2f2; }}
figure {{ margin: 1.5rem 0; }} svg {{ max-width: 100%; height: auto; }} figcaption {{ color: #555; }}
</style></head><body>
{body}
{figures}
</body></html>
"""


def unique_ids(svg, prefix):
    """Makes the ids of a picture unique, so that several pictures fit into one page."""
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', svg)
    return re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}-", svg)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a directory below out/profiles")
    runs = [Run(directory) for directory in parser.parse_args().runs]
    across = crossover(runs)
    for run in runs:
        pictures = {"roofline": roofline(run), "stages": stages(run)}
        for path in sorted(run.directory.glob("tiling/*/autotuning.json")):
            pictures[f"tuning-{path.parent.name}"] = tuning(path.parent.name, json.loads(path.read_text()))
        pictures["crossover"] = across
        figures = ""
        for name, svg in pictures.items():
            if svg is None:
                continue
            (run.directory / f"{name}.svg").write_text('<?xml version="1.0" encoding="utf-8"?>\n' + svg)
            figures += f'<figure id="{name}">{unique_ids(svg, name)}<figcaption>{name}</figcaption></figure>\n'
        body = markdown((run.directory / "report.md").read_text())
        (run.directory / "report.html").write_text(
            PAGE.format(title=html.escape(f"Profile: {run.profile['kernel']}"), body=body, figures=figures))
        print(run.directory / "report.html")


if __name__ == "__main__":
    main()
