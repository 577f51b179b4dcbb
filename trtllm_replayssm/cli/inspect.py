"""``trtllm-replayssm inspect``: what a model or engine folder holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from trtllm_replayssm.builders.inspection import EngineInspection, Inspection


def command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Engine, rank checkpoint or Hugging Face folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show layers, state pools, profiles, plugins and versions of a folder."""
    from trtllm_replayssm.builders.inspection import inspect_folder

    found = inspect_folder(folder)
    if as_json:
        print(found.model_dump_json(indent=2))
        return
    console = Console()
    console.print(_model_table(found))
    console.print(_states_table(found))
    if found.engine is not None:
        for table in _engine_tables(found.engine):
            console.print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(column, overflow="fold", justify="left" if index == 0 else "default")
    return table


def _facts(title: str, facts: dict[str, object]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE, show_header=False)
    for name, value in facts.items():
        table.add_row(name, str(value))
    return table


def _model_table(found: Inspection) -> Table:
    geometry = found.geometry
    facts: dict[str, object] = {
        "folder": f"{found.path} ({found.kind.replace('_', ' ')})",
        "architecture": f"{geometry.architecture}, {geometry.dtype}, d_model {geometry.d_model}, "
        f"vocabulary {geometry.vocab_size}",
        "layers": f"{found.pattern}  ({', '.join(f'{count} {kind}' for kind, count in found.layers.items())})",
    }
    if m := geometry.mamba2:
        facts["mamba2"] = (
            f"{m.n_heads} heads x {m.head_dim}, d_state {m.d_state}, {m.n_groups} groups, d_conv {m.d_conv}"
        )
    if a := geometry.attention:
        facts["attention"] = f"{a.n_query_heads} query, {a.n_kv_heads} key/value heads x {a.head_dim}"
    if p := geometry.mlp:
        facts["mlp"] = f"d_ff {p.d_ff}, {p.activation}"
    place = "in the folder" if found.has_weights else "not in the folder"
    facts["weights"] = f"{found.num_parameters:,} parameters, {_size(found.weights_bytes)}, {place}"
    return _facts("Model", facts)


def _states_table(found: Inspection) -> Table:
    replay = found.replay
    table = _table(
        f"States of one slot (history {replay.history}, max_draft_len {replay.max_draft_len}, "
        f"max_seq_len {found.max_seq_len})",
        "state",
        "layers",
        "shape per layer",
        "type",
        "bytes per slot",
    )
    for pool in found.states:
        shape = " x ".join(str(d) for d in pool.slot_shape)
        table.add_row(pool.kind, str(pool.layers), shape, pool.dtype, f"{pool.bytes_per_slot:,}")
    table.add_row("total", "", "", "", f"{found.state_bytes_per_slot:,}")
    return table


def _engine_tables(engine: EngineInspection) -> list[Table]:
    manifest = engine.manifest
    limits = manifest.limits
    targets = ", ".join(f"{value // 10}.{value % 10}" for value in manifest.compute_capabilities)
    facts: dict[str, object] = {
        "built with": f"{manifest.backend} {manifest.backend_version}, trtllm-replayssm {manifest.package_version}",
        "runs on": f"compute capability {targets}",
        "size": f"{_size(manifest.engine_bytes)}, sha256 {manifest.engine_sha256[:16]}...",
        "weights": manifest.weights,
        "limits": f"max_batch_size {limits.max_batch_size}, max_input_len {limits.max_input_len}, "
        f"max_seq_len {limits.max_seq_len}, max_num_tokens {limits.max_num_tokens}",
        "bindings": ", ".join(f"{count} {role}" for role, count in engine.bindings.items())
        + f"; {engine.aliased_states} states updated in place",
        "network layers": _counts(engine.network_layers),
        "engine layers": _counts(engine.engine_layers),
        "build time": ", ".join(f"{step} {seconds:.1f} s" for step, seconds in engine.seconds.items()),
    }
    profiles = _table("Profiles (least, best, most)", "profile", "rows B", "window S", "logit positions J")
    for profile in manifest.profiles:
        ranges = (profile.batch, profile.window, profile.logits)
        profiles.add_row(profile.name, *(", ".join(str(value) for value in values) for values in ranges))
    plugins = _table("Plugins", "plugin", "version", "layers", "kernels", "kernel sha256")
    for plugin in manifest.plugins:
        size = _size(plugin.kernels_bytes)
        name = f"{plugin.namespace}::{plugin.op_type}"
        plugins.add_row(name, plugin.version, str(plugin.nodes), size, plugin.kernels_sha256[:16] + "...")
    layers = _table("Plugin layers", "name")
    for name in engine.plugin_layers:
        layers.add_row(name)
    return [_facts("Engine", facts), profiles, plugins, layers]


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "not reported"


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"
