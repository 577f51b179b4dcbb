"""Why keys of a config are known and not read, and tensors of a checkpoint left out."""

from typing import Final

INITIALISATION: Final = "used when weights are initialised, not when they are run"
TRAINING: Final = "used in training alone"
API: Final = "a switch of the transformers library's own interface"
EXPERTS: Final = "describes expert layers, of which this model has none"
MTP: Final = "describes the multi-token prediction head, which is not run"
TOKENIZER: Final = "the tokenizer's own template begins a text; rows of a batch are not padded"
BOOKKEEPING: Final = "names who wrote the file, and how to load it there"
STATE_DTYPE: Final = "the state's type is the user's choice (ReplayConfig.state_dtype)"
VISION: Final = "describes the vision part of a multimodal model, of which the text part alone is run"
TEXT_POSITIONS: Final = "places images and video; the positions of a text are the same in all its axes"

MTP_WEIGHTS: Final = "the multi-token prediction head is not run"
VISION_WEIGHTS: Final = "the vision part of a multimodal model; the text part alone is run"
