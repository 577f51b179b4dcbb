"""What a benchmark found, as tables."""

from string import ascii_lowercase

from rich.table import Table

from trtllm_replayssm.bench.peers.registry import NOT_INSTALLED
from trtllm_replayssm.bench.report import Comparison, KernelReport, Kind, Measurement
from trtllm_replayssm.cli.tables import facts_table, new_table


def report_tables(report: KernelReport) -> list[Table]:
    """Return what a run found as tables: the machine, one table per implementation, and ours beside the peers."""
    machine = report.machine
    smi = machine.nvidia_smi
    facts: dict[str, object] = {
        "card": f"{machine.card}, compute capability {machine.compute_capability}",
        "copy bandwidth": f"{report.copy_gigabytes_per_s:,.0f} GB/s, read + written",
        "driver": smi.get("driver_version", "not known"),
        "clocks": f"SM {smi['clocks.sm']} MHz, memory {smi['clocks.mem']} MHz" if "clocks.mem" in smi else "not known",
        "versions": ", ".join(f"{name} {version}" for name, version in machine.versions.items()),
        "peers": ", ".join(f"{name} {version}" for name, version in report.peers.items()) or "left out",
        "command": report.command,
    }
    if set(report.peers.values()) == {NOT_INSTALLED}:
        facts["peers"] = f"none importable ({', '.join(report.peers)} not installed)"
    by_implementation: dict[str, list[Measurement]] = {}
    for measurement in report.measurements:
        by_implementation.setdefault(measurement.implementation, []).append(measurement)
    made = [facts_table("Machine", facts), *(_measured_table(*item) for item in by_implementation.items())]
    made += _compared_tables(report.comparisons)
    if report.failures:
        left_out = new_table("Peers that were left out", "implementation", "case", "reason")
        for failure in report.failures:
            left_out.add_row(failure.implementation, failure.case, failure.reason)
        made.append(left_out)
    return made


_PEER_KINDS: tuple[Kind, ...] = ("conventional", "replay", "prefill")


def _compared_tables(comparisons: tuple[Comparison, ...]) -> list[Table]:
    """Return a table per implementation of ours and window: our time, its limit, each peer's time, and the ratios."""
    by_work: dict[tuple[str, int], list[Comparison]] = {}
    for c in comparisons:
        by_work.setdefault((c.implementation, c.window), []).append(c)
    return [_compared_table(*work, of_work) for work, of_work in by_work.items()]


def _compared_table(implementation: str, window: int, comparisons: list[Comparison]) -> Table:
    peers = list(dict.fromkeys(peer for c in comparisons for peer in c.peers))
    kinds = [kind for kind in _PEER_KINDS if any(kind in c.best for c in comparisons)]
    letters = dict(zip(peers, ascii_lowercase, strict=False))
    ratios = [f"/{_SHORT[kind]}" for kind in kinds]
    numbers = ("B", "us", "limit", *letters.values(), *ratios)
    table = new_table(f"{implementation} beside its peers, T = {window}", "shape", "state", *numbers, numbers=numbers)
    # All peers of a step fit into 100 columns so.
    table.padding = (0, 1, 0, 0)
    legend = ", ".join(f"{letter}: {peer}" for peer, letter in letters.items())
    table.caption = (
        f"  us of peers, each in its fastest launch setting, which the JSON document names: {legend}\n"
        f"  {', '.join(ratios)}: our time over that of the fastest {', '.join(kinds)} peer; below 1 ours is faster\n"
    )
    table.caption_justify = "left"
    for c in comparisons:
        times = (f"{c.peers[peer]:.1f}" if peer in c.peers else "-" for peer in peers)
        over = (f"{c.time_over_best[kind]:.2f}" if kind in c.time_over_best else "-" for kind in kinds)
        own = (str(c.batch_size), f"{c.us:.1f}", f"{c.limit_us:.1f}")
        table.add_row(c.shape, _ABBREVIATED.get(c.state_dtype or "", "-"), *own, *times, *over)
    return table


_ABBREVIATED = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_SHORT: dict[Kind, str] = {"conventional": "conv.", "replay": "replay", "prefill": "peer"}


def _measured_table(implementation: str, measurements: list[Measurement]) -> Table:
    has_flushes = any(m.flush_fraction is not None for m in measurements)
    has_conventional = any(m.conventional_limit_us is not None for m in measurements)
    numbers = (
        "T",
        "B",
        "us",
        "spread",
        "GB/s",
        "% of copy",
        "time/limit",
        *(("conv./us",) if has_conventional else ()),
        *(("flush", "pend.") if has_flushes else ()),
    )
    table = new_table(implementation, "shape", "state", *numbers, numbers=numbers)
    captions = []
    if has_conventional:
        table.padding = (0, 1, 0, 0)  # into 100 columns
        captions.append("  conv./us: the limit of a step that writes a state per token, over this time\n")
    if has_flushes:
        captions.append("  flush: rows that write their state; pend.: mean pending rows\n")
    if captions:
        table.caption, table.caption_justify = "".join(captions), "left"
    for m in measurements:
        table.add_row(
            *(m.shape, m.state_dtype or "-", str(m.window), str(m.batch_size)),
            *(f"{m.us:.1f}", f"{m.spread:.1%}", f"{m.gigabytes_per_s:,.0f}", f"{m.share_of_copy:.0%}"),
            f"{m.time_over_limit:.2f}",
            *((f"{(m.conventional_limit_us or 0.0) / m.us:.2f}",) if has_conventional else ()),
            *((f"{m.flush_fraction:.3f}", f"{m.mean_pending:.1f}") if has_flushes else ()),
        )
    return table
