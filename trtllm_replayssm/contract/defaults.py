"""What is taken where a user says nothing: one place for the builder, the runtime and the command line."""

from typing import Final

HISTORY: Final = 16
STATE_DTYPE: Final = "float32"
MAX_BATCH_SIZE: Final = 8
# On a GPU: the most slots that are taken unasked, where the memory has room for them. More would seldom run at a time,
# and the largest step's logits grow with them.
MAX_GPU_BATCH_SIZE: Final = 256
# An engine's longest prompt, and what it leaves for the answer.
MAX_INPUT_LEN: Final = 1024
MAX_NEW_TOKENS: Final = 1024
# A cache of a model's whole context for every slot would fill most devices; who needs more says so.
MAX_SEQ_LEN: Final = 4096
# A prompt piece long enough to keep a GPU busy, short enough not to stall the other requests for long; a longer one
# takes activation memory in proportion.
MAX_NUM_TOKENS: Final = 2048
# A prompt piece of more tokens keeps a GPU busy for as long as the host takes to start its operations, one by one.
MAX_CAPTURED_PROMPT: Final = 1024
# Pieces of prompts that may run between two decode steps. Each costs at least a launch of the whole model, as does a
# decode step: a request waits for its next token as long as for so many steps, and a batch fills that much faster.
MAX_PROMPT_STEPS: Final = 8
# The prompts of the prefill benchmark.
PREFILL_TOKENS: Final = 4096
# What TensorRT-RTX builds for, of those the installed version knows: Ampere (A100, RTX 30), Ada (RTX 40, L4, L40) and
# Blackwell (RTX 50).
RTX_CAPABILITIES: Final = (80, 86, 89, 120)
