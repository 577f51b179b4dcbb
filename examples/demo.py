"""The whole path on a small trained model: convert, build, inspect, generate with and without speculation.

Run it with ``make demo``, or ``python examples/demo.py`` where the package is installed. It writes to ``.demo/``.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from trtllm_replayssm import LLM, NGramDecodingConfig, ReplayConfig, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "examples" / "tiny_hybrid" / "model"
WORK = ROOT / ".demo"
CHECKPOINT = WORK / "checkpoint"
ENGINE = WORK / "engine"
HISTORY = 16
# Not adaptive: what is counted should not depend on the machine's speed.
SPECULATION = NGramDecodingConfig(max_draft_len=4, max_matching_ngram_size=3, adaptive=False)
# They end within a line: the model's tokenizer joins a line feed to the indentation after it.
PROMPTS = [
    "def get(self, key, default=None):\n    try:",
    "    for name in names:\n        if name in self._cache:\n            return self._cache[name]\n        else:",
    'def read(self, size=-1):\n    """Read and return up to size bytes.',
]
GREEDY = SamplingParams(max_tokens=96, temperature=0.0)
WIDTH = 110

console = Console(width=WIDTH)


def run_command(*arguments: str) -> None:
    """Show a command of the package, then run it as a user would."""
    console.rule(f"trtllm-replayssm {arguments[0]}")
    shown = " ".join(part.replace(f"{ROOT}/", "") for part in arguments)
    console.print(f"$ trtllm-replayssm {shown}", style="bold", highlight=False, markup=False)
    program = Path(sys.executable).with_name("trtllm-replayssm")
    subprocess.run([program, *arguments], check=True, cwd=ROOT, env={**os.environ, "COLUMNS": str(WIDTH)})


def generate(title: str, llm: LLM) -> tuple[list[str], dict[str, int | float]]:
    """Return the texts of the prompts and what it took."""
    console.print(f"{title}: {llm.executor} executor on {llm.device}", style="dim")
    outputs = llm.generate(PROMPTS, GREEDY)
    return [output.outputs[0].text for output in outputs], llm.metrics()


def compare(runs: dict[str, dict[str, int | float]]) -> Table:
    """Return a table with one column a run."""
    rows = {
        "tokens generated": "num_generated_tokens",
        "decode steps": "num_decode_steps",
        "drafts proposed": "num_draft_tokens",
        "drafts accepted": "num_accepted_drafts",
        "flushes (checkpoints written)": "num_flushes",
    }
    traffic = {"state MB read": "state_bytes_read", "state MB written": "state_bytes_written"}
    table = Table(title=f"{len(PROMPTS)} prompts, greedy, history {HISTORY}", title_justify="left")
    table.add_column("")
    for name in runs:
        table.add_column(name, justify="right")
    for label, key in rows.items():
        table.add_row(label, *(f"{int(metrics[key]):,}" for metrics in runs.values()))
    for label, key in traffic.items():
        table.add_row(label, *(f"{metrics[key] / 1e6:,.1f}" for metrics in runs.values()))
    totals = [metrics["state_bytes_read"] + metrics["state_bytes_written"] for metrics in runs.values()]
    table.add_row("state traffic, conventional = 1", *(f"{total / totals[0]:.2f}" for total in totals))
    return table


def main() -> int:
    """Run the demo; 0 when speculation changed no text and saved steps."""
    shutil.rmtree(WORK, ignore_errors=True)
    # In float32 a window of five tokens and five windows of one round alike, so that texts can be compared exactly.
    run_command(
        *("convert", "--model_dir", str(MODEL), "--output_dir", str(CHECKPOINT)),
        *("--dtype", "float32"),
    )
    run_command(
        *("build", "--checkpoint_dir", str(CHECKPOINT), "--output_dir", str(ENGINE)),
        *("--max_batch_size", "4", "--max_input_len", "256", "--max_seq_len", "512"),
        *("--max_draft_len", str(SPECULATION.max_draft_len), "--history", str(HISTORY)),
    )
    run_command("inspect", str(ENGINE))

    console.rule("generate")
    conventional = ReplayConfig(history=HISTORY, enabled=False)
    limits = {"max_batch_size": 4, "max_seq_len": 512}
    models = {
        "conventional": LLM(CHECKPOINT, executor="torch", replay=conventional, **limits),
        "replay": LLM(CHECKPOINT, executor="torch", replay=ReplayConfig(history=HISTORY), **limits),
        # The engine folder: on a GPU that its backend supports the engine runs, elsewhere the torch executor does.
        "replay + n-gram drafts": LLM(ENGINE, speculative_config=SPECULATION),
    }
    results = {title: generate(title, llm) for title, llm in models.items()}
    texts, _ = results["replay + n-gram drafts"]
    for prompt, text in zip(PROMPTS, texts, strict=True):
        console.print("prompt", style="dim")
        console.print(prompt, style="bold", highlight=False, markup=False, soft_wrap=True)
        console.print("continued", style="dim")
        console.print(text, highlight=False, markup=False, soft_wrap=True)
        console.rule(style="dim")
    runs = {title: metrics for title, (_, metrics) in results.items()}
    console.print(compare(runs))

    same = all(found == texts for found, _ in results.values())
    fewer = runs["replay + n-gram drafts"]["num_decode_steps"] < runs["replay"]["num_decode_steps"]
    console.print(f"same text with and without speculation: {'yes' if same else 'NO'}")
    console.print(f"fewer steps with speculation: {'yes' if fewer else 'NO'}")
    return 0 if same and fewer else 1


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # there are no options: one that is given is refused
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:  # the command has said why
        sys.exit(error.returncode)
