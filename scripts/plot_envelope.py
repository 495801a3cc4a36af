#!/usr/bin/env python3
"""Time over the queries per request, of this library's paths and of its peers, as bench_envelope.py recorded it.

    scripts/plot_envelope.py results/nvidia-h200/envelope.json docs/results/time-over-s.svg

Above: sustained times; dotted lines are the model's predictions. Below: every time over the best of this library, and
which of its paths that is. A path that is the fastest nowhere is drawn thin. Needs matplotlib, as plot_profile.py does.
"""

from pictures import draw_record, plain_numbers, pyplot, ticker

STYLES = {"latent": ("tab:green", "o"), "decompressed": ("tab:orange", "s"), "hybrid": ("tab:blue", "^")}
PEERS = (("0.2", "x"), ("tab:red", "v"), ("tab:purple", "D"))  # colour and marker


def choose(record):
    """The rows of the picture: every path's and peer's own case, where it was measured."""
    return [row for row in record["rows"] if row["case"] == f"s={row['s']}" and "sustained_us" in row]


def lines_of(rows):
    """{name: {s: row}}: the fastest kernel of each path, every peer for itself."""
    lines = {}
    for row in rows:
        line = lines.setdefault(row["kernel"] if row["path"] == "peer" else row["path"], {})
        if row["s"] not in line or row["sustained_us"] < line[row["s"]]["sustained_us"]:
            line[row["s"]] = row
    return lines


def fastest(lines):
    """{s: (sustained us, path)} of this library."""
    best = {}
    for name in STYLES:
        for s, row in lines.get(name, {}).items():
            best[s] = min(best.get(s, (row["sustained_us"], name)), (row["sustained_us"], name))
    return dict(sorted(best.items()))


def spans(best):
    """[(path, first s, last s)]: which path is the fastest where."""
    found = []
    for s, (_, path) in best.items():
        if found and found[-1][0] == path:
            found[-1][2] = s
        else:
            found.append([path, s, s])
    return found


def draw(record, rows):
    lines = lines_of(rows)
    best = fastest(lines)
    winners = {path for _, path in best.values()}
    figure, (times, ratios) = pyplot.subplots(2, 1, figsize=(7, 6.6), sharex=True, height_ratios=(3, 2))
    peers = [name for name in lines if name not in STYLES]
    for name in [*(name for name in STYLES if name in lines), *peers]:
        points = sorted(lines[name].items())
        colour, marker = STYLES.get(name) or PEERS[peers.index(name) % len(PEERS)]
        style = {"color": colour, "marker": marker, "linestyle": "-" if name in STYLES else "--", "markersize": 4,
                 "linewidth": 1.8 if name in winners else 0.9}
        label = f"HyperMLA, {name}" if name in STYLES else name
        if name in STYLES and name not in winners:
            label += " (fastest nowhere)"
        times.plot([s for s, _ in points], [row["sustained_us"] for _, row in points], label=label, **style)
        over = [(s, row["sustained_us"] / best[s][0]) for s, row in points if s in best]
        ratios.plot(*zip(*over), **style)
        if name in peers:
            for s, ratio in over:
                if ratio == min(line[s]["sustained_us"] / best[s][0] for peer, line in lines.items()
                                if peer in peers and s in line):  # the best peer at this s
                    ratios.annotate(f"{ratio:.2f}", (s, ratio), (0, -10), textcoords="offset points", ha="center",
                                    fontsize=7)
        predicted = [(s, row["predicted_us"]) for s, row in points if "predicted_us" in row]
        if predicted:
            times.plot(*zip(*predicted), color=colour, linestyle=":", linewidth=1)
    problem = record["problem"]
    times.set(yscale="log", ylabel="sustained time, us (dotted: model)",
              title=f"{record['device']['name']}, " + ", ".join(f"{key}={value}" for key, value in problem.items()) +
                    "; output decompression included")
    times.set_xscale("log", base=2)
    plain_numbers(times.yaxis)
    times.legend(fontsize=8, loc="lower right")
    everywhere = list(best)
    for path, first, last in spans(best):  # between two values of s the border is half way, as the axis shows it
        before = [s for s in everywhere if s < first]
        behind = [s for s in everywhere if s > last]
        left = (before[-1] * first) ** 0.5 if before else first / 2 ** 0.5
        right = (last * behind[0]) ** 0.5 if behind else last * 2 ** 0.5
        for axes in (times, ratios):
            axes.axvspan(left, right, color=STYLES[path][0], alpha=0.08, linewidth=0)
        ratios.annotate(f"fastest: {path}", ((left * right) ** 0.5, 2.42), ha="center", fontsize=8,
                        color=STYLES[path][0])
    ratios.axhline(1, color="0.5", linewidth=1)
    ratios.set(xlabel="queries per request, s", ylabel="time over the\nbest of HyperMLA", ylim=(0.9, 2.6))
    ratios.xaxis.set_major_locator(ticker.LogLocator(base=2, numticks=20))
    ratios.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    return figure


if __name__ == "__main__":
    draw_record(__doc__.split("\n\n")[0], "envelope", choose, draw,
                "no measured row; run bench_envelope.py --record again")
