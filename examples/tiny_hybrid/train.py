"""Trains a tiny Mamba-2/attention language model on the Python standard library.

The result is an ordinary Hugging Face folder (`NemotronHForCausalLM` in bfloat16 and
a byte-level BPE tokenizer) that is small enough to keep in a repository, yet writes
text that a person recognises as Python. The training text is the source of the
standard library of the interpreter that runs the script, so nothing is downloaded.

    python train.py --output_dir model
"""

from __future__ import annotations

import argparse
import logging
import math
import random
import shutil
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from tqdm import tqdm
from transformers import (
    AutoTokenizer,
    NemotronHConfig,
    NemotronHForCausalLM,
    PreTrainedTokenizerFast,
)

logger = logging.getLogger("train")

END = "<|endoftext|>"
# Tests are repetitive; `encodings` and `pydoc_data` are tables, not code; lib2to3 and
# idlelib are not in every Python; `_sysconfigdata*` describes the machine at hand.
SKIPPED_FOLDERS = {
    "test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages",
    "__pycache__", "encodings", "pydoc_data", "turtledemo",
}  # fmt: skip
SKIPPED_PREFIX = "_sysconfigdata"
# Positions per block of the scan: the attention-like products within a block are
# quadratic in it, and the number of blocks that are chained one by one inverse to it.
SCAN_BLOCK = 64


def parse_args() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=6000, help="optimiser steps")
    parser.add_argument("--batch_size", type=int, default=8, help="sequences per step")
    parser.add_argument("--seq_len", type=int, default=256, help=f"multiple of {SCAN_BLOCK}")
    parser.add_argument("--learning_rate", type=float, default=4e-3, help="peak rate")
    parser.add_argument("--warmup_steps", type=int, default=200)
    parser.add_argument("--weight_decay", type=float, default=0.1)
    parser.add_argument("--vocab_size", type=int, default=2048)
    parser.add_argument("--hidden_size", type=int, default=192, help="multiple of 32")
    parser.add_argument("--pattern", default="M-M-M*-M-", help="M mamba, * attention, - MLP")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="torch.compile the loss (needs a C++ compiler)",
    )
    args = parser.parse_args()
    if args.seq_len % SCAN_BLOCK:
        parser.error(f"--seq_len must be a multiple of {SCAN_BLOCK}")
    return args


def read_corpus(seed: int) -> tuple[list[str], list[str]]:
    """Reads the standard library's modules, in an order that only the seed decides.

    Returns:
        The texts to train on, and those of the files held out (one in twenty).
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [
        path
        for path in sorted(root.rglob("*.py"), key=lambda path: path.as_posix())
        if not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)
        and not path.name.startswith(SKIPPED_PREFIX)
    ]
    random.Random(seed).shuffle(paths)
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
    held_out = len(texts) // 20
    return texts[held_out:], texts[:held_out]


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer whose token 0 begins, ends and pads a text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    """Joins the texts to one stream of tokens, each text opened by the end token."""
    encodings = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    end = tokenizer.convert_tokens_to_ids(END)
    return torch.tensor([token for item in encodings for token in [end, *item.ids]])


def build_model(args: argparse.Namespace) -> NemotronHForCausalLM:
    """Builds the untrained model: heads of 64 everywhere, one KV head, no biases."""
    names = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
    config = NemotronHConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        layers_block_type=[names[letter] for letter in args.pattern],
        tie_word_embeddings=False,
        num_attention_heads=args.hidden_size // 64,
        num_key_value_heads=1,
        head_dim=64,
        intermediate_size=args.hidden_size * 8 // 3,
        ssm_state_size=64,
        mamba_num_heads=2 * args.hidden_size // 64,
        mamba_head_dim=64,
        n_groups=2,
        conv_kernel=4,
        expand=2,
        chunk_size=128,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = NemotronHForCausalLM(config)
    # The initial time steps are drawn from [0.001, 0.1]. Later uses of the lower bound
    # would clamp the trained steps of a prompt but not those of single tokens, so it
    # is put out of reach.
    config.time_step_min = 1e-6
    return model


def scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Runs the Mamba-2 recurrence in blocks, with heads of a group side by side.

    Args:
        x: Inputs, [batch, time, heads, head_dim].
        dt: Positive time steps, [batch, time, heads], float32.
        a: Negative decay rates, [heads], float32.
        b: Input maps, [batch, time, groups, state].
        c: Output maps, [batch, time, groups, state].

    Returns:
        Outputs without the skip term, [batch, time, heads, head_dim].
    """
    batch, length, heads, width = x.shape
    groups, state = b.shape[2:]
    per, blocks = heads // groups, length // SCAN_BLOCK
    dt = dt.view(batch, blocks, SCAN_BLOCK, groups, per).permute(0, 1, 3, 4, 2)
    x = x.view(batch, blocks, SCAN_BLOCK, groups, per, width).permute(0, 1, 3, 4, 2, 5)
    b, c = (m.view(batch, blocks, SCAN_BLOCK, groups, state).transpose(2, 3) for m in (b, c))
    x = x * dt.unsqueeze(-1)
    decay = torch.cumsum(dt * a.view(groups, per, 1), dim=-1)  # [batch, block, group, per, time]

    # Within a block: masked scores, as in attention without softmax.
    past = torch.ones(SCAN_BLOCK, SCAN_BLOCK, dtype=torch.bool).tril()
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(~past, -torch.inf)
    scores = (c @ b.transpose(-1, -2)).unsqueeze(3) * between.exp()
    y = scores @ x

    # Across blocks: the state that each block adds, chained by the decay of whole blocks.
    last = decay[..., -1:]
    left = (x * (last - decay).exp().unsqueeze(-1)).transpose(3, 4).flatten(4)
    added = (b.transpose(-1, -2) @ left).unflatten(-1, (per, width))
    carry, carried = torch.zeros_like(added[:, 0]), []
    for i in range(blocks):
        carried.append(carry)
        carry = carry * last[:, i].exp().transpose(2, 3).unsqueeze(-1) + added[:, i]
    start = (c @ torch.stack(carried, 1).flatten(4)).unflatten(-1, (per, width))
    y = y + start.transpose(3, 4) * decay.exp().unsqueeze(-1)
    return y.permute(0, 1, 4, 2, 3, 5).reshape(batch, length, heads, width)


def mamba(mixer: nn.Module, hidden: Tensor) -> Tensor:
    """Computes what a Mamba-2 mixer computes, from its weights."""
    inner, groups, heads = mixer.intermediate_size, mixer.n_groups, mixer.num_heads
    z, xbc, dt = mixer.in_proj(hidden).split([inner, mixer.conv_dim, heads], dim=-1)
    taps = mixer.conv1d.weight.squeeze(1).unbind(-1)
    padded = F.pad(xbc, (0, 0, len(taps) - 1, 0))
    xbc = mixer.conv1d.bias + sum(
        padded[:, i : i + xbc.shape[1]] * tap for i, tap in enumerate(taps)
    )
    maps = groups * mixer.ssm_state_size
    x, b, c = F.silu(xbc).split([inner, maps, maps], dim=-1)
    x = x.unflatten(-1, (heads, -1))
    dt = F.softplus(dt.float() + mixer.dt_bias)
    y = scan(x, dt, -mixer.A_log.exp(), b.unflatten(-1, (groups, -1)), c.unflatten(-1, (groups, -1)))
    y = (y + x * mixer.D.unsqueeze(-1)).flatten(2) * F.silu(z.float())
    y = F.rms_norm(y.unflatten(-1, (groups, -1)), (inner // groups,), eps=mixer.norm.variance_epsilon)
    return mixer.out_proj(y.flatten(2) * mixer.norm.weight)


def attention(mixer: nn.Module, hidden: Tensor) -> Tensor:
    """Computes what an attention mixer computes, from its weights (no positions)."""
    projections = (mixer.q_proj, mixer.k_proj, mixer.v_proj)
    q, k, v = (p(hidden).unflatten(-1, (-1, mixer.head_dim)).transpose(1, 2) for p in projections)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return mixer.o_proj(y.transpose(1, 2).flatten(2))


def loss_of(model: NemotronHForCausalLM, tokens: Tensor) -> Tensor:
    """Computes the mean loss of next-token prediction, several times faster than the model.

    Args:
        model: The model whose weights are used.
        tokens: [batch, seq_len + 1].
    """
    mixers: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
        "linear_attention": mamba,
        "full_attention": attention,
        "mlp": lambda mixer, hidden: mixer(hidden),
    }
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model.embeddings(tokens[:, :-1])
        for layer in model.model.layers:
            hidden = hidden + mixers[layer.block_type](layer.mixer, layer.norm(hidden))
        logits = model.lm_head(model.model.norm_f(hidden))
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def batches(stream: Tensor, batch_size: int, seq_len: int, seed: int) -> Iterator[Tensor]:
    """Yields shuffled windows of the stream for ever, cut anew in each epoch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        first = int(torch.randint(seq_len, (), generator=generator))
        windows = stream[first:].unfold(0, seq_len + 1, seq_len)
        for rows in torch.randperm(len(windows), generator=generator).split(batch_size):
            if len(rows) == batch_size:
                yield windows[rows]


def train(model: NemotronHForCausalLM, stream: Tensor, args: argparse.Namespace) -> None:
    """Trains the model in place: AdamW, linear warm-up, cosine decay, clipped gradients."""
    decayed = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
        lr=args.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=args.weight_decay,
        fused=True,
    )

    def schedule(step: int) -> float:
        done = (step - args.warmup_steps) / max(1, args.steps - args.warmup_steps)
        return min((step + 1) / args.warmup_steps, 0.5 + 0.5 * math.cos(math.pi * max(0.0, done)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    compute = torch.compile(loss_of) if args.compile else loss_of
    feed, mean = batches(stream, args.batch_size, args.seq_len, args.seed), None
    with tqdm(range(args.steps), desc="training", mininterval=2) as progress:
        for _ in progress:
            loss = compute(model, next(feed))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            mean = loss.item() if mean is None else 0.98 * mean + 0.02 * loss.item()
            progress.set_postfix(loss=f"{mean:.3f}", refresh=False)


@torch.inference_mode()
def evaluate(model: NemotronHForCausalLM, stream: Tensor, seq_len: int) -> float:
    """Measures the mean loss per token with the model's own forward pass."""
    total, windows = 0.0, stream.unfold(0, seq_len + 1, seq_len)
    for rows in tqdm(windows.split(16), desc="evaluating", mininterval=2):
        logits = model(rows[:, :-1], use_cache=False).logits
        total += F.cross_entropy(
            logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum"
        ).item()
    return total / (len(windows) * seq_len)


def save(
    model: NemotronHForCausalLM, tokenizer: PreTrainedTokenizerFast, output_dir: Path
) -> None:
    """Writes the folder beside its place and renames it there once it is whole."""
    staging = output_dir.with_name(output_dir.name + ".partial")
    shutil.rmtree(staging, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    if output_dir.exists():
        shutil.rmtree(output_dir)
    staging.rename(output_dir)


def main() -> None:
    """Trains, writes, loads again and measures."""
    args = parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)

    texts, held_out_texts = read_corpus(args.seed)
    tokenizer = train_tokenizer(texts, args.vocab_size)
    stream, held_out = encode(tokenizer, texts), encode(tokenizer, held_out_texts)
    model = build_model(args)
    logger.info(
        "%d files, %d tokens to train on, %d held out; %d parameters",
        len(texts), len(stream), len(held_out), model.num_parameters(),
    )  # fmt: skip

    started = time.monotonic()
    train(model, stream, args)
    seconds = time.monotonic() - started
    rate = args.steps * args.batch_size * args.seq_len / seconds
    logger.info("trained in %.0f s, %.0f tokens/s", seconds, rate)
    save(model, tokenizer, args.output_dir)

    model = NemotronHForCausalLM.from_pretrained(args.output_dir, dtype=torch.bfloat16)
    loss = evaluate(model, held_out, args.seq_len)
    logger.info("held-out loss %.3f nats/token, perplexity %.2f", loss, math.exp(loss))
    tokenizer = AutoTokenizer.from_pretrained(args.output_dir)
    prompt = tokenizer("def __init__(self, ", return_tensors="pt")
    logger.info("%s", tokenizer.decode(model.generate(**prompt, max_new_tokens=120)[0]))


if __name__ == "__main__":
    main()
