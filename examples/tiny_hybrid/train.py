"""Train a tiny Mamba-2 and attention language model on the source of the Python standard library.

The result is an ordinary Hugging Face folder (``NemotronHForCausalLM`` in bfloat16, a byte-level BPE tokenizer), small
enough for a repository. The text is the standard library of the interpreter that runs the script: nothing is fetched.

    python examples/tiny_hybrid/train.py --output_dir examples/tiny_hybrid/model
"""

import argparse
import math
import random
import shutil
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm
from transformers import AutoTokenizer, NemotronHConfig, NemotronHForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

PATTERN = "M-M-M*-M-"  # M: Mamba-2, *: attention, -: MLP
HIDDEN_SIZE = 192
VOCAB_SIZE = 2048
MAX_LENGTH = 2048
END = "<|endoftext|>"
# Tests repeat themselves; encodings and pydoc_data are tables; lib2to3 and idlelib are not in every Python.
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data"}
SKIPPED_FOLDERS |= {"site-packages", "dist-packages", "__pycache__"}
SKIPPED_PREFIX = "_sysconfigdata"  # describes the machine at hand
HELD_OUT_CHARACTERS = 16384  # of each held-out file: no long module decides the loss
SCAN_BLOCK = 64  # positions; work within a block is quadratic in it, and blocks are chained one by one


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True, help="folder to write; an older one is replaced")
    parser.add_argument("--steps", type=int, default=5000, help="optimiser steps (default: %(default)s)")
    parser.add_argument("--batch_size", type=int, default=8, help="sequences of a step (default: %(default)s)")
    parser.add_argument("--seq_len", type=int, default=256, help=f"a multiple of {SCAN_BLOCK} (default: %(default)s)")
    parser.add_argument("--learning_rate", type=float, default=4e-3, help="the highest (default: %(default)s)")
    parser.add_argument("--warmup_steps", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--weight_decay", type=float, default=0.1, help="of matrices (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    parser.add_argument("--no_compile", action="store_true", help="do not torch.compile, which needs a C++ compiler")
    args = parser.parse_args()
    if args.seq_len % SCAN_BLOCK:
        parser.error(f"--seq_len: found {args.seq_len}; needed a multiple of {SCAN_BLOCK}")
    return args


def read_corpus(seed: int) -> tuple[list[str], list[str]]:
    """Return the texts to train on, and the beginnings of one file in twenty, held out. The seed decides the order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [
        path
        for path in sorted(root.rglob("*.py"), key=lambda path: path.as_posix())
        if not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts) and not path.name.startswith(SKIPPED_PREFIX)
    ]
    random.Random(seed).shuffle(paths)
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
    held_out = len(texts) // 20
    return texts[held_out:], [text[:HELD_OUT_CHARACTERS] for text in texts[:held_out]]


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, whose token 0 begins, ends and pads texts."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
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
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    """Return all texts as one stream of tokens, the end token before each."""
    encodings = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    end = tokenizer.convert_tokens_to_ids(END)
    return torch.tensor([token for encoding in encodings for token in [end, *encoding.ids]])


def build_model() -> NemotronHForCausalLM:
    """Return the untrained model; all its heads are 64 wide."""
    names = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
    config = NemotronHConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        layers_block_type=[names[letter] for letter in PATTERN],
        num_attention_heads=HIDDEN_SIZE // 64,
        num_key_value_heads=1,
        head_dim=64,
        intermediate_size=HIDDEN_SIZE * 8 // 3,
        expand=2,
        mamba_num_heads=HIDDEN_SIZE * 2 // 64,
        mamba_head_dim=64,
        ssm_state_size=64,
        n_groups=2,
        conv_kernel=4,
        chunk_size=128,
        max_position_embeddings=MAX_LENGTH,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = NemotronHForCausalLM(config)
    # The first time steps are drawn from [0.001, 0.1]. Once trained, transformers would clamp those of a prompt at the
    # lower bound, but not those of the tokens it generates: out of reach, the bound treats both alike.
    config.time_step_min = 1e-6
    return model


def scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Run the Mamba-2 recurrence block by block.

    Args:
        x: inputs, [batch, time, heads, head_dim].
        dt: positive time steps, [batch, time, heads], float32.
        a: negative decay rates, [heads], float32.
        b: input maps, [batch, time, groups, state].
        c: output maps, [batch, time, groups, state].

    Returns:
        The outputs without the skip term, [batch, time, heads, head_dim].
    """
    batch, length, heads, width = x.shape
    groups, state = b.shape[2:]
    per, blocks = heads // groups, length // SCAN_BLOCK
    dt = dt.view(batch, blocks, SCAN_BLOCK, groups, per).permute(0, 1, 3, 4, 2)
    x = x.view(batch, blocks, SCAN_BLOCK, groups, per, width).permute(0, 1, 3, 4, 2, 5)
    b, c = (m.view(batch, blocks, SCAN_BLOCK, groups, state).transpose(2, 3) for m in (b, c))
    x = x * dt.unsqueeze(-1)
    decay = torch.cumsum(dt * a.view(groups, per, 1), dim=-1)  # [batch, blocks, groups, per, time]

    # Within a block: masked scores, as in attention without the softmax.
    past = torch.ones(SCAN_BLOCK, SCAN_BLOCK, dtype=torch.bool).tril()
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(~past, -torch.inf)
    scores = (c @ b.transpose(-1, -2)).unsqueeze(3) * between.exp()
    y = scores @ x

    # Across blocks: what each block adds to the state, chained by the decay of whole blocks.
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
    """Compute a Mamba-2 mixer from its weights."""
    inner, groups, heads = mixer.intermediate_size, mixer.n_groups, mixer.num_heads
    z, xbc, dt = mixer.in_proj(hidden).split([inner, mixer.conv_dim, heads], dim=-1)
    taps = mixer.conv1d.weight.squeeze(1).unbind(-1)
    padded = functional.pad(xbc, (0, 0, len(taps) - 1, 0))
    xbc = mixer.conv1d.bias + sum(padded[:, i : i + xbc.shape[1]] * tap for i, tap in enumerate(taps))
    maps = groups * mixer.ssm_state_size
    x, b, c = functional.silu(xbc).split([inner, maps, maps], dim=-1)
    x, b, c = x.unflatten(-1, (heads, -1)), b.unflatten(-1, (groups, -1)), c.unflatten(-1, (groups, -1))
    y = scan(x, functional.softplus(dt.float() + mixer.dt_bias), -mixer.A_log.exp(), b, c)
    y = (y + x * mixer.D.unsqueeze(-1)).flatten(2) * functional.silu(z.float())
    y = functional.rms_norm(y.unflatten(-1, (groups, -1)), (inner // groups,), eps=mixer.norm.variance_epsilon)
    return mixer.out_proj(y.flatten(2) * mixer.norm.weight)


def attention(mixer: nn.Module, hidden: Tensor) -> Tensor:
    """Compute an attention mixer (it knows no positions) from its weights."""
    projections = (mixer.q_proj, mixer.k_proj, mixer.v_proj)
    q, k, v = (p(hidden).unflatten(-1, (-1, mixer.head_dim)).transpose(1, 2) for p in projections)
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return mixer.o_proj(y.transpose(1, 2).flatten(2))


def loss_of(model: NemotronHForCausalLM, tokens: Tensor) -> Tensor:
    """Return the mean next-token loss of [batch, seq_len + 1] tokens: the model's own, several times faster."""
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
    return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def batches(stream: Tensor, batch_size: int, seq_len: int, seed: int) -> Iterator[Tensor]:
    """Yield shuffled windows of the stream without end, cut in other places in each epoch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        first = int(torch.randint(seq_len, (), generator=generator))
        windows = stream[first:].unfold(0, seq_len + 1, seq_len)
        order = torch.randperm(len(windows), generator=generator)
        yield from (windows[rows] for rows in order.split(batch_size) if len(rows) == batch_size)


def train(model: NemotronHForCausalLM, stream: Tensor, args: argparse.Namespace) -> None:
    """Train the model in place: AdamW, linear warm-up, cosine decay, clipped gradients."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.95), fused=True)

    def rate(step: int) -> float:
        done = max(0, step - args.warmup_steps) / max(1, args.steps - args.warmup_steps)
        return min((step + 1) / max(1, args.warmup_steps), 0.5 + 0.5 * math.cos(math.pi * done))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    compute = loss_of if args.no_compile else torch.compile(loss_of)
    feed, mean = batches(stream, args.batch_size, args.seq_len, args.seed), math.log(VOCAB_SIZE)
    with tqdm(range(args.steps), desc="training", mininterval=1) as progress:
        for step in progress:
            loss = compute(model, next(feed))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            mean += (loss.item() - mean) * max(0.01, 1 / (step + 1))
            progress.set_postfix(loss=f"{mean:.3f}", refresh=False)


@torch.inference_mode()
def evaluate(model: NemotronHForCausalLM, stream: Tensor, seq_len: int) -> float:
    """Return the mean loss of a token, from the model's own forward pass."""
    total, windows = 0.0, stream.unfold(0, seq_len + 1, seq_len)
    for rows in tqdm(windows.split(16), desc="evaluating", mininterval=1):
        logits = model(rows[:, :-1], use_cache=False).logits
        total += functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum").item()
    return total / (len(windows) * seq_len)


def save(model: NemotronHForCausalLM, tokenizer: PreTrainedTokenizerFast, output_dir: Path) -> None:
    """Write the folder beside its place, and rename it once it is whole."""
    staging = output_dir.with_name(output_dir.name + ".partial")
    shutil.rmtree(staging, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    shutil.rmtree(output_dir, ignore_errors=True)
    staging.rename(output_dir)


def main() -> None:
    """Train, write the folder, load it again and measure what it holds."""
    args = parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)

    texts, held_out_texts = read_corpus(args.seed)
    tokenizer = train_tokenizer(texts)
    stream, held_out = encode(tokenizer, texts), encode(tokenizer, held_out_texts)
    model = build_model()
    print(f"{len(texts)} files, {len(stream)} tokens; held out: {len(held_out_texts)} files, {len(held_out)} tokens")
    print(f"{model.num_parameters()} parameters")

    started = time.monotonic()
    train(model, stream, args)
    seconds = time.monotonic() - started
    print(f"trained in {seconds:.0f} s, {args.steps * args.batch_size * args.seq_len / seconds:.0f} tokens/s")
    save(model, tokenizer, args.output_dir)

    model = NemotronHForCausalLM.from_pretrained(args.output_dir, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(args.output_dir)
    loss = evaluate(model, held_out, args.seq_len)
    print(f"held-out loss {loss:.3f} nats/token, perplexity {math.exp(loss):.2f}")
    prompt = tokenizer("def __init__(self, ", return_tensors="pt")
    print(tokenizer.decode(model.generate(**prompt, max_new_tokens=120)[0]))


if __name__ == "__main__":
    main()
