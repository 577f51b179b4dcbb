"""``trtllm-replayssm inspect``: what a model or engine folder holds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from trtllm_replayssm.cli.tables import facts_table, new_table, rendered
from trtllm_replayssm.contract.capability import capability_text
from trtllm_replayssm.contract.memory_plan import size_text

if TYPE_CHECKING:
    from trtllm_replayssm.builders.inspection import EngineInspection, Inspection
    from trtllm_replayssm.contract.memory import StatePool

_KIND_NAMES = {"huggingface": "Hugging Face folder", "rank_checkpoint": "rank checkpoint", "engine": "engine"}
_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_SHOWN_KINDS = 8
_SHOWN_LAYERS = 6


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
    tables = [_model_table(found), _states_table(found), _memory_table(found)]
    if found.engine is not None:
        tables += _engine_tables(found.engine)
    print(rendered(tables))


def _model_table(found: Inspection) -> Table:
    geometry = found.geometry
    facts: dict[str, object] = {
        "folder": found.path,
        "kind": _KIND_NAMES[found.kind],
        "architecture": f"{geometry.architecture}, {geometry.dtype}, d_model {geometry.d_model}, "
        f"vocabulary {geometry.vocab_size}",
        "layers": f"{found.pattern}  ({', '.join(f'{count} {kind}' for kind, count in found.layers.items())})",
    }
    if m := geometry.mamba2:
        facts["mamba2"] = (
            f"{m.n_heads} heads x {m.head_dim}, d_state {m.d_state}, {m.n_groups} groups, d_conv {m.d_conv}"
        )
    if g := geometry.gated_delta_net:
        facts["gated_delta_net"] = (
            f"{g.n_key_heads} key heads x {g.key_dim}, {g.n_value_heads} value heads x {g.value_dim}, d_conv {g.d_conv}"
        )
    if a := geometry.attention:
        rotary = f", {a.rotary_dim} channels rotated, base {a.rope_theta:,.0f}" if a.rope_theta else ""
        gate = ", output gate" if a.has_output_gate else ""
        facts["attention"] = f"{a.n_query_heads} query, {a.n_kv_heads} key/value heads x {a.head_dim}{rotary}{gate}"
    if p := geometry.mlp:
        facts["mlp"] = f"d_ff {p.d_ff}, {p.activation}"
    if head := geometry.mtp:
        facts["mtp"] = f"multi-token prediction head: {', '.join(head.layer_types)}"
    place = "in the folder" if found.has_weights else "not in the folder"
    facts["weights"] = f"{found.num_parameters:,} parameters, {size_text(found.weights_bytes)}, {place}"
    return facts_table("Model", facts)


def _states_table(found: Inspection) -> Table:
    replay = found.replay
    table = new_table(
        f"States of one slot (history {replay.history}, max_draft_len {replay.max_draft_len}, "
        f"max_seq_len {found.max_seq_len})",
        *("state", "layers", "shape per layer", "type", "bytes", "MiB"),
        numbers=("layers", "bytes", "MiB"),
    )
    caches = [pool for pool in found.states if pool.kind in ("key_cache", "value_cache")]
    recurrent = [pool for pool in found.states if pool not in caches]
    for name, pools in (("all recurrent", recurrent), ("all key/value", caches)):
        _add_pools(table, name, pools)
    table.add_row("total", "", "", "", *_bytes_and_mib(found.state_bytes_per_slot))
    all_slots = size_text(found.max_batch_size * found.state_bytes_per_slot)
    table.caption = f"  x max_batch_size {found.max_batch_size} = {all_slots}\n"
    table.caption_justify = "left"
    return table


def _memory_table(found: Inspection) -> Table:
    plan = found.memory
    table = new_table(
        f"Memory (max_batch_size {plan.limits.max_batch_size}, max_num_tokens {plan.limits.max_num_tokens})",
        *("part", "bytes", "MiB"),
        numbers=("bytes", "MiB"),
    )
    for name, num_bytes in plan.parts().items():
        if num_bytes:
            table.add_row(name, *_bytes_and_mib(num_bytes))
    table.add_section()
    table.add_row("total", *_bytes_and_mib(plan.total))
    if found.engine is not None:
        table.caption = "  TensorRT's own activations come on top\n"
        table.caption_justify = "left"
    return table


def _add_pools(table: Table, name: str, pools: list[StatePool]) -> None:
    for pool in pools:
        shape = " x ".join(str(d) for d in pool.slot_shape)
        table.add_row(pool.kind, str(pool.layers), shape, pool.dtype, *_bytes_and_mib(pool.bytes_per_slot))
    if pools:
        table.add_row(name, "", "", "", *_bytes_and_mib(sum(pool.bytes_per_slot for pool in pools)), end_section=True)


def _bytes_and_mib(num_bytes: int) -> tuple[str, str]:
    return f"{num_bytes:,}", f"{num_bytes / 2**20:,.3f}"


def _engine_tables(engine: EngineInspection) -> list[Table]:
    manifest = engine.manifest
    limits = manifest.limits
    times = ", ".join(f"{step} {seconds:.1f}" for step, seconds in engine.seconds.items())
    facts: dict[str, object] = {
        "built with": f"{manifest.backend} {manifest.backend_version}, trtllm-replayssm {manifest.package_version}",
        "runs on": f"compute capability {capability_text(*manifest.compute_capabilities)}",
        "size": f"{size_text(manifest.engine_bytes)}, sha256 {_short(manifest.engine_sha256)}",
        "weights": manifest.weights,
        "limits": f"max_batch_size {limits.max_batch_size}, max_input_len {limits.max_input_len}, "
        f"max_seq_len {limits.max_seq_len}, max_num_tokens {limits.max_num_tokens}",
        "bindings": ", ".join(f"{count} {role}" for role, count in engine.bindings.items())
        + f"; {engine.aliased_states} states updated in place",
        "network layers": _counts(engine.network_layers),
        "plugin layers": "\n".join(_grouped(engine.plugin_layers)),
        f"engine layers, {len(manifest.profiles)} profiles": _counts(engine.engine_layers),
        **_mtp_facts(engine),
        "build time": f"{sum(engine.seconds.values()):.1f} s: {times}" if times else "not reported",
    }
    profiles = new_table("Profiles (least, best, most)", "profile", "batch", "tokens per row", "logits per row")
    for profile in manifest.profiles:
        ranges = (profile.batch, profile.window, profile.logits)
        profiles.add_row(profile.name, *(", ".join(str(value) for value in values) for values in ranges))
    columns = ("plugin", "version", "layers", "kernels", "kernel sha256")
    plugins = new_table("Plugins", *columns, numbers=("version", "layers", "kernels"))
    for plugin in manifest.plugins:
        size = size_text(plugin.kernels_bytes)
        plugins.add_row(plugin.op_type, plugin.version, str(plugin.nodes), size, _short(plugin.kernels_sha256))
    return [facts_table("Engine", facts), profiles, plugins]


def _mtp_facts(engine: EngineInspection) -> dict[str, object]:
    """Return what there is to say of the multi-token prediction head's engine; nothing without one."""
    head = engine.manifest.mtp
    if head is None:
        return {}
    return {
        "mtp engine": f"{size_text(head.engine_bytes)}, sha256 {_short(head.engine_sha256)}; reads the hidden states "
        "that the model's engine returns",
        "mtp network layers": _counts(engine.mtp_network_layers),
        "mtp engine layers": _counts(engine.mtp_engine_layers),
    }


def _counts(counts: dict[str, int]) -> str:
    ranked = list(counts.items())  # the most frequent first
    shown = [f"{count} {kind}" for kind, count in ranked[:_SHOWN_KINDS]]
    if rest := ranked[_SHOWN_KINDS:]:
        shown.append(f"and {sum(count for _, count in rest)} of {len(rest)} more types")
    return ", ".join(shown) or "not reported"


def _grouped(names: tuple[str, ...]) -> list[str]:
    """Join names that differ in their layer's number alone: ``layers.{0,2}.mixer.ReplayMamba2 x2``."""
    numbers: dict[str, list[str]] = {}
    for name in names:
        number = _LAYER_NUMBER.search(name)
        numbers.setdefault(_LAYER_NUMBER.sub("{}", name, count=1), []).append(number[0] if number else "")
    return [
        f"{pattern.replace('{}', '{' + ','.join(_shortened(found)) + '}')} x{len(found)}"
        for pattern, found in numbers.items()
    ]


def _shortened(items: list[str]) -> list[str]:
    return items if len(items) <= _SHOWN_LAYERS else [*items[: _SHOWN_LAYERS - 1], "...", items[-1]]


def _short(sha256: str) -> str:
    return sha256[:12] + "..."
