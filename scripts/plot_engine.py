#!/usr/bin/env python3
"""What other libraries take of this one's time in decoding as an engine calls it, as bench_engine.py recorded it.

    scripts/plot_engine.py results/nvidia-h200/engine.json docs/results/engine.svg

A bar for each library of a batch: its time in bursts over ours; a dot: the same between an engine's other kernels. The
batches are few of the record's, one of each kind; docs/results/engine.md has all. Needs matplotlib, as plot_profile.py
does.
"""

from pictures import draw_record, matplotlib, pyplot

PEERS = {"flashmla": ("FlashMLA", "0.35"), "fa3": ("FlashAttention-3", "tab:red"),
         "flashinfer": ("FlashInfer", "tab:purple")}
BATCHES = {"b1-q1-t4096": "1 request of 1 query and 4096 tokens",
           "b32-q1-t4096": "32 requests of 1 query and 4096 tokens",
           "b128-q1-t4096": "128 requests of 1 query and 4096 tokens",
           "b32-q4-t4096": "32 requests of 4 queries and 4096 tokens",
           "heavy-b96-q1-t4096": "96 requests of 1 query, heavy-tailed lengths, up to 131072 tokens",
           "mixed-b32-q1to8-t4096": "32 requests of 1 to 8 queries (others: 4 of each) and 4096 tokens"}
HEADS = (128, 64, 16)
MOST = 2.4  # where the axis ends; what is beyond is written


def choose(record):
    """[(title, [(heads, row)])]: the batches of the picture."""
    rows = {row["row"]: row for row in record["rows"] if "burst_us" in row.get("ours", {})}
    batches = [(title, [(h, rows[f"{name}-h{h}"]) for h in HEADS if f"{name}-h{h}" in rows])
               for name, title in BATCHES.items()]
    return [(title, of) for title, of in batches if of]


def draw(record, batches):
    lines = sum(1.6 + len(of) * (len(PEERS) + 0.9) for _, of in batches)
    figure, axes = pyplot.subplots(figsize=(7, 0.8 + 0.122 * lines))
    y, ticks = 0, {}
    for title, of in batches:
        axes.text(0.02, y, title, fontsize=8, fontweight="bold", va="center",
                  bbox={"facecolor": "white", "linewidth": 0, "pad": 0.5})
        y += 1.4
        for h, row in of:
            ticks[y + len(PEERS) / 2 - 0.5] = f"{h} heads, {row['ours']['burst_us']:.1f} us"
            for key, (name, colour) in PEERS.items():
                theirs = row.get(key, {})
                if "burst_us" in theirs:
                    ratio = theirs["burst_us"] / row["ours"]["burst_us"]
                    axes.barh(y, min(ratio, MOST), height=0.92, color=colour)
                    axes.text(0.02, y + 0.05, f"{ratio:.2f}", fontsize=6.5, color="white", va="center")
                if "between_us" in theirs and "between_us" in row["ours"]:
                    ratio = theirs["between_us"] / row["ours"]["between_us"]
                    axes.plot(min(ratio, MOST), y, "o", color="black", markerfacecolor="white", markersize=3.5,
                              markeredgewidth=0.8, clip_on=False, zorder=3)
                    if ratio > MOST:
                        axes.annotate(f"{ratio:.2f}", (MOST, y), (5, 0), textcoords="offset points", fontsize=7,
                                      va="center", annotation_clip=False)
                y += 1
            y += 0.5
        y += 0.7
    axes.axvline(1, color="black", linewidth=1, zorder=1.5)
    axes.set(xlim=(0, MOST), ylim=(y - 0.7, -1.1), yticks=list(ticks), yticklabels=list(ticks.values()),
             xlabel=f"time over that of HyperMLA, which is 1 (beyond {MOST}: written)")
    axes.set_title(f"{record['device']['name']}, {record['date']}: decoding as an engine calls it, in bursts; "
                   "on the left HyperMLA's time", fontsize=9, pad=22, x=0.4)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    handles = [matplotlib.patches.Patch(color=colour, label=name) for name, colour in PEERS.values()]
    handles.append(matplotlib.lines.Line2D([], [], linestyle="", marker="o", color="black", markerfacecolor="white",
                                           markersize=3.5, markeredgewidth=0.8,
                                           label="between an engine's other kernels"))
    axes.legend(handles=handles, fontsize=7, ncol=4, loc="lower center", bbox_to_anchor=(0.4, 1), frameon=False)
    return figure


if __name__ == "__main__":
    draw_record(__doc__.split("\n\n")[0], "engine", choose, draw,
                "none of the batches that the picture shows; run bench_engine.py --record without --rows")
