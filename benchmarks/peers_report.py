"""The report of peers.py: conditions, tables of medians, ratios and bounds, and a plot."""

from __future__ import annotations

import os
from pathlib import Path
from statistics import median
from typing import Any

from peers_cell import BATCH, MICRO_BATCH, Prompt
from peers_plan import (
    EXACT,
    FORMATS,
    LLAMA_CPP,
    NUM_DECODED,
    NUM_SEQUENCES,
    OURS,
    WARM,
    Format,
    Sizes,
    prefetch_name,
)
from peers_rows import Found, Row, rows

SYSTEMS = (OURS, EXACT, LLAMA_CPP)
ONE, MANY = (WARM.index(Prompt(count, 32, NUM_DECODED)) for count in (1, NUM_SEQUENCES))
BEGIN = "<!-- peers: begin (benchmarks/peers.py) -->"
END = "<!-- peers: end -->"
NEW_PAGE = f"""# Performance

{BEGIN}
{END}
"""
# Tokens per second with hints for exactly the pages a step reads, over those without: measured once
# for issue 23 on the same shape of model. llama.cpp does not ship it, and it is not run here.
HINTED = {"4GiB": 4.25 / 0.65, "2GiB": 2.18 / 0.37}
HOW = f"""\
Every value comes from a process of its own. All processes get the same token ids: a prompt at once,
then {NUM_DECODED} tokens one by one. Values are medians over the rounds, with the smallest and the
largest. A ratio says how many times as fast as llama.cpp. It compares two processes of one round,
which ran one shortly after the other.

- *first token*: seconds from the start of loading to the logits of the prompt. Packages were
  imported before, and an earlier process compiled the kernels. *Cold*: no file is in the page
  cache. *Cached*: the files were read once before.
- *warm*: a later prompt of the same process, of other text, after one of
  {WARM[0].num_tokens:,} tokens.
- *decode*: tokens per second after a prompt. *First prompt*: that of a process, files cached.
  *Limit*: in a memory cgroup that counts the page cache, files cold, after 32 tokens.
  *{NUM_SEQUENCES} sequences*: of different text, in one forward pass.
- *bound*: bytes that must be read over the rate of reading them. Cold they come from the disk, at
  the higher of its two rates, else from memory. For a prompt, it is the time of its matrix products
  at torch's rate if that is longer. Under a limit, it is the disk's random rate over the bytes that
  this system did read for each token.
- llama.cpp has its own defaults: the file is mapped, flash attention is on where it helps, batches
  have {BATCH:,} tokens and passes {MICRO_BATCH}. It has as many threads as there are cores. Weights
  are not repacked if its file is larger than the limit, because the process would be killed.
- 8-bit is our int8 against q8_0; 4-bit is our int4 in groups of 32 against q4_0. llama.cpp's files
  have the dense weights quantized, too; ours have them in bf16.
- GGUF: both programs read the same file. Q4_K is llama.cpp's mix Q4_K_M."""


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def spread(values: list[float]) -> str:
    if not values:
        return "-"
    if len(values) == 1:
        return number(values[0])
    return f"{number(median(values))} ({number(min(values))} .. {number(max(values))})"


def table(header: list[str], lines: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *lines)]


def format_table(found: Found, form: Format) -> list[str]:
    header = ["", *SYSTEMS, "ours / llama.cpp", "exact / llama.cpp"]
    lines = []
    for row in rows(found.limits):
        cells = [found.cell(form.name, row.scenario, system) for system in SYSTEMS]
        if not any(cells):
            continue
        line = [row.title]
        for system, results in zip(SYSTEMS, cells, strict=True):
            failures = {result["failed"] for result in results if "failed" in result}
            values = list(found.values(form.name, row, system).values())
            line.append(", ".join([spread(values)] * bool(values) + sorted(failures)) or "-")
        line += [spread(found.ratios(form.name, row, system)) for system in (OURS, EXACT)]
        line += [number(found.bound(form.name, row, system)) for system in (OURS, LLAMA_CPP)]
        target = row.gguf_target if form.is_same_file else row.target
        lines.append([*line, number(target)])
    header += ["bound, ours", "bound, llama.cpp", "target"]
    return [f"### {form.name}", "", *table(header, lines), "", *batch_line(found, form.name)]


def batch_line(found: Found, form: str) -> list[str]:
    """What eight sequences give over one, of each system."""
    one, many = (Row("", "warm", prompt_idx, "decode") for prompt_idx in (ONE, MANY))
    said = []
    for system in SYSTEMS:
        single, batch = (found.values(form, row, system) for row in (one, many))
        if gains := [batch[at] / single[at] for at in single]:
            said.append(f"{system} {spread(gains)}")
    if not said:
        return []
    return [f"Tokens of {NUM_SEQUENCES} sequences over those of one: {'; '.join(said)}.", ""]


def prefetch_table(found: Found) -> list[str]:
    """The default against the other setting."""
    header = ["", "default", "prefetch", "tok/s", "tok/s over the default's"]
    lines = []
    limit_rows = [row for row in rows(found.limits) if row.scenario.startswith("limit")]
    for form, row in ((form.name, row) for form in FORMATS for row in limit_rows):
        for is_on in (False, True):
            system = prefetch_name(is_on)
            if other := list(found.values(form, row, system).values()):
                default = spread(list(found.values(form, row, OURS).values()))
                gains = spread(found.ratios(form, row, system, OURS))
                name = f"{form}, {row.title.removesuffix(', tok/s')}"
                lines.append([name, default, "on" if is_on else "off", spread(other), gains])
    return ["### Prefetch", "", *table(header, lines), ""] if lines else []


def hinted_table(found: Found) -> list[str]:
    """llama.cpp with hints for the pages it reads next, as a factor of what was measured."""
    header = ["", "ours", "llama.cpp", "factor", "hinted", "ours / hinted", "target"]
    lines = []
    for row in rows(found.limits):
        factor = HINTED.get(row.scenario.removeprefix("limit "))
        values = [list(found.values("bf16", row, system).values()) for system in (OURS, LLAMA_CPP)]
        if factor and all(values):
            gains = [ratio / factor for ratio in found.ratios("bf16", row, OURS)]
            hinted = number(median(values[1]) * factor)
            told = [*map(spread, values), number(factor), hinted, spread(gains)]
            lines.append([row.title, *told, "1.3" if "4GiB" in row.scenario else "-"])
    if not lines:
        return []
    note = (
        "Hints for exactly the pages that a step reads make llama.cpp faster under a limit. It does"
        " not ship them. The factor is that of issue 23, measured on a model of this shape; it was"
        " not measured again."
    )
    return ["### bf16 under a limit, with page hints", "", note, "", *table(header, lines), ""]


def conditions(found: Found) -> list[str]:
    """The model, the machine, the rates of the run and the programs."""
    about = found.results["about"]
    config, machine = about["config"], about["machine"]
    size = found.results["sizes"]["bf16"][OURS] if "bf16" in found.results["sizes"] else None
    lines = [
        f"Model: {config['num_hidden_layers']} layers of {config['num_experts']} experts, "
        f"top-{config['num_experts_per_tok']}, hidden size {config['hidden_size']}, expert width "
        f"{config['moe_intermediate_size']}"
        + (f", {Sizes(**size).total / 1e9:.2g} GB in bf16." if size else "."),
        f"Machine: {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB of memory.",
        f"Rounds: {max(map(len, found.results['cells'].values()))}.",
    ]
    others = [each["others_cores"] for system in SYSTEMS for each in found.all_of(system)]
    lines.append(f"Other programs used {spread(others)} of its cores meanwhile.")
    for system in SYSTEMS:
        told = [each["about"] for each in found.all_of(system)]
        lines += [f"{system}: {text}." for text in dict.fromkeys(told)]
    header = ["rate of the run", "median (smallest .. largest)"]
    rates = [[title, spread(values)] for title, values in found.rates_by_title().items()]
    return [*(f"- {line}" for line in lines), "", *table(header, rates), ""]


def warm_line(found: Found) -> str:
    """Whether what is called warm was."""
    read = [
        prompt["read_bytes"]
        for system in SYSTEMS
        for each in found.all_of(system)
        for prompt in each["prompts"][1:]
    ]
    return f"Warm prompts read at most {max(read, default=0) / 1e6:,.0f} MB from the disk."


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    found = Found(results)
    measured = [form for form in FORMATS if form.name in results["sizes"]]
    lines = ["## Against llama.cpp", "", HOW, "", *conditions(found)]
    for form in measured:
        lines += format_table(found, form)
    lines += [*hinted_table(found), *prefetch_table(found), warm_line(found)]
    return "\n".join(lines)


def update_page(page: Path, text: str, figure: Path | None) -> None:
    """Put the report between the marks of the page; what is around them stays."""
    old = page.read_text("utf-8") if page.exists() else NEW_PAGE
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(
            f"{page} has no place for the report: it needs the lines {BEGIN} and {END}"
        )
    if figure is not None:
        name = Path(os.path.relpath(figure, page.parent)).as_posix()
        text += f"\n\n![Times as fast as llama.cpp, by format and row]({name})"
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", "utf-8")


def ratios(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Median ratio to llama.cpp of every row, by system."""
    found = Found(results)
    return {
        system: {
            f"{form}, {row.title}": round(median(values), 3)
            for form in results["sizes"]
            for row in rows(found.limits)
            if (values := found.ratios(form, row, system))
        }
        for system in (OURS, EXACT)
    }


def plot(results: dict[str, Any], file: Path) -> None:
    """One panel a format: ratios with their spread, by row."""
    import matplotlib

    matplotlib.use("svg" if file.suffix == ".svg" else "agg")
    from matplotlib import pyplot

    found = Found(results)
    measured = list(results["sizes"])
    shown = [
        row for row in rows(found.limits) if any(found.ratios(form, row, OURS) for form in measured)
    ]
    pyplot.rcParams.update({"font.size": 9, "svg.hashsalt": "peers", "svg.fonttype": "none"})
    size = (4 + 3 * len(measured), 0.28 * len(shown) + 1.5)
    figure, panels = pyplot.subplots(
        1,
        len(measured),
        sharex=True,
        sharey=True,
        squeeze=False,
        figsize=size,
        layout="constrained",
    )
    for form, axes in zip(measured, panels[0], strict=True):
        for system, offset, colour in ((OURS, -0.15, "tab:blue"), (EXACT, 0.15, "tab:orange")):
            axes.plot([], [], "o", color=colour, markersize=4, label=system)
            for at, row in enumerate(shown):
                if values := found.ratios(form, row, system):
                    middle = median(values)
                    bars = [[middle - min(values)], [max(values) - middle]]
                    style = {"fmt": "o", "color": colour, "markersize": 4}
                    axes.errorbar(middle, at + offset, xerr=bars, **style)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set(xscale="log", title=form, xlabel="times as fast as llama.cpp")
        axes.grid(axis="x", alpha=0.3)
    panels[0, 0].set_yticks(range(len(shown)), [row.title.rpartition(",")[0] for row in shown])
    panels[0, 0].invert_yaxis()
    legend = panels[0, 0].get_legend_handles_labels()
    figure.legend(*legend, loc="outside lower center", ncols=2)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
