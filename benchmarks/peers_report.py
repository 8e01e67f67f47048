"""The report of peers.py: a CSV with every median and its spread, and a table and a plot of it.

    python benchmarks/peers.py --report runs/peers.json --csv docs/plots/performance.csv
    python benchmarks/peers_report.py docs/plots/performance.csv \\
        --page docs/performance.md --plot docs/plots/peers.svg
"""

from __future__ import annotations

import argparse
import csv
import os
from pathlib import Path
from statistics import median
from typing import Any

from peers_plan import EXACT, FORMATS, LLAMA_CPP, OURS, Sizes, prefetch_name
from peers_rows import Found, rows

SYSTEMS = (OURS, EXACT, LLAMA_CPP, prefetch_name(True), prefetch_name(False))
RATES = "rates of the run"  # in place of a format
COLUMNS = (
    "format", "what", "unit", "system", "median", "smallest", "largest", "times llama.cpp",
    "smallest ratio", "largest ratio", "bound",
)  # fmt: skip
BEGIN = "<!-- peers: begin (benchmarks/peers_report.py) -->"
END = "<!-- peers: end -->"
NOT_SHOWN = ("load, cached", "decode, first prompt, 32 tokens")  # the CSV has them
Line = dict[str, str]  # by COLUMNS


def number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def times(ratio: str) -> str:
    """How many times as fast, in brackets; nothing if it was not compared."""
    if not ratio:
        return ""
    value = float(ratio)
    return f" ({value:.0f})" if value >= 10 else f" ({value:.{1 if value >= 1 else 2}f})"


def spread(values: list[float]) -> list[str]:
    """Median, smallest and largest; empty cells if there are no values."""
    if not values:
        return ["", "", ""]
    return [number(each) for each in (median(values), min(values), max(values))]


def measurements(results: dict[str, Any]) -> list[Line]:
    """Every row of every format and system, then the rates of the run."""
    found = Found(results)
    cells: list[list[str]] = []
    for form in (form.name for form in FORMATS if form.name in results["sizes"]):
        for row in rows(found.limits):
            what, _, unit = row.title.rpartition(", ")
            for system in SYSTEMS:
                if not (values := list(found.values(form, row, system).values())):
                    continue
                ratios = found.ratios(form, row, system) if system != LLAMA_CPP else []
                bound = found.bound(form, row, system) if system in (OURS, LLAMA_CPP) else None
                best = "" if bound is None else number(bound)
                cells.append([form, what, unit, system, *spread(values), *spread(ratios), best])
    for title, rates in found.rates_by_title().items():
        what, _, unit = title.rpartition(", ")
        cells.append([RATES, what, unit, "", *spread(rates), "", "", "", ""])
    return [dict(zip(COLUMNS, line, strict=True)) for line in cells]


def write_csv(lines: list[Line], file: Path) -> None:
    with file.open("w", encoding="utf-8", newline="") as opened:
        writer = csv.DictWriter(opened, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def read_csv(file: Path) -> list[Line]:
    with file.open(encoding="utf-8", newline="") as opened:
        return list(csv.DictReader(opened))


def conditions(results: dict[str, Any]) -> str:
    """The model, the machine and the programs, and what failed."""
    found = Found(results)
    about = results["about"]
    config, machine = about["config"], about["machine"]
    size = results["sizes"]["bf16"][OURS] if "bf16" in results["sizes"] else None
    lines = [
        f"Model: {config['num_hidden_layers']} layers of {config['num_experts']} experts, "
        f"top-{config['num_experts_per_tok']}, hidden size {config['hidden_size']}, expert width "
        f"{config['moe_intermediate_size']}"
        + (f", {Sizes(**size).total / 1e9:.2g} GB in bf16." if size else "."),
        f"Machine: {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB of memory.",
        f"Rounds: {max(map(len, results['cells'].values()))}.",
    ]
    processes = [each for system in SYSTEMS for each in found.all_of(system)]
    middle, least, most = spread([each["others_cores"] for each in processes])
    lines.append(f"Other programs used {middle} ({least} .. {most}) of its cores meanwhile.")
    for system in SYSTEMS:
        texts = dict.fromkeys(each["about"] for each in found.all_of(system))
        lines += [f"{system}: {text}." for text in texts]
    read = [prompt["read_bytes"] for each in processes for prompt in each["prompts"][1:]]
    lines.append(f"Warm prompts read at most {max(read, default=0) / 1e6:,.0f} MB from the disk.")
    for key, cell in results["cells"].items():
        failures = {each["failed"] for each in cell if "failed" in each}
        lines += [f"{key}: {failure}." for failure in sorted(failures)]
    return "\n".join(lines)


def table(lines: list[Line]) -> str:
    """Our medians, and in brackets how many times as fast as llama.cpp they are."""
    ours = [line for line in lines if line["system"] == OURS and line["what"] not in NOT_SHOWN]
    forms = list(dict.fromkeys(line["format"] for line in ours))
    by_row: dict[str, dict[str, str]] = {}
    for line in ours:
        middle = f"{float(line['median']):#.3g}".rstrip(".")
        row = by_row.setdefault(f"{line['what']}, {line['unit']}", {})
        row[line["format"]] = middle + times(line["times llama.cpp"])
    header = ["", *forms]
    body = [[row, *(cells.get(form, "") for form in forms)] for row, cells in by_row.items()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *body))


def update_page(page: Path, text: str, figure: Path | None) -> None:
    """Put the table between the marks of the page; what is around them stays."""
    before, begin, rest = page.read_text("utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{page} has no place for the table: it needs the lines {BEGIN} and {END}")
    if figure is not None:
        name = Path(os.path.relpath(figure, page.parent)).as_posix()
        text += f"\n\n![Times as fast as llama.cpp, by format and row]({name})"
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", "utf-8")


def plot(lines: list[Line], file: Path) -> None:
    """One panel a format: ratios with their spread, by row."""
    import matplotlib

    matplotlib.use("svg" if file.suffix == ".svg" else "agg")
    from matplotlib import pyplot

    compared = [line for line in lines if line["times llama.cpp"]]
    forms = list(dict.fromkeys(line["format"] for line in compared))
    shown = list(dict.fromkeys(line["what"] for line in compared if line["system"] == OURS))
    pyplot.rcParams.update({"font.size": 9, "svg.hashsalt": "peers", "svg.fonttype": "none"})
    figure, panels = pyplot.subplots(
        1,
        len(forms),
        sharex=True,
        sharey=True,
        squeeze=False,
        figsize=(4 + 3 * len(forms), 0.28 * len(shown) + 1.5),
        layout="constrained",
    )
    for form, axes in zip(forms, panels[0], strict=True):
        for system, offset, colour in ((OURS, -0.15, "tab:blue"), (EXACT, 0.15, "tab:orange")):
            axes.plot([], [], "o", color=colour, markersize=4, label=system)
            for line in compared:
                if (line["format"], line["system"]) == (form, system):
                    middle = float(line["times llama.cpp"])
                    least, most = float(line["smallest ratio"]), float(line["largest ratio"])
                    at = shown.index(line["what"]) + offset
                    style = {"fmt": "o", "color": colour, "markersize": 4}
                    axes.errorbar(middle, at, xerr=[[middle - least], [most - middle]], **style)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set(xscale="log", title=form, xlabel="times as fast as llama.cpp")
        axes.grid(axis="x", alpha=0.3)
    panels[0, 0].set_yticks(range(len(shown)), shown)
    panels[0, 0].invert_yaxis()
    legend = panels[0, 0].get_legend_handles_labels()
    figure.legend(*legend, loc="outside lower center", ncols=2)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("csv", type=Path, help="what peers.py --csv wrote")
    parser.add_argument("--page", type=Path, help="write the table into this page")
    parser.add_argument("--plot", type=Path, help="draw the ratios into this file")
    args = parser.parse_args()
    lines = read_csv(args.csv)
    if args.plot:
        plot(lines, args.plot)
    if args.page:
        update_page(args.page, table(lines), args.plot)
    print(table(lines))


if __name__ == "__main__":
    main()
