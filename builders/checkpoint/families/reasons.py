"""Why keys of a config are known and not read, and tensors of a checkpoint left out."""

from typing import Final

INITIALISATION: Final = "used when weights are initialised, not when they are run"
TRAINING: Final = "used in training alone"
API: Final = "a switch of the transformers library's own interface"
EXPERTS: Final = "describes expert layers, of which this model has none"
TOKENIZER: Final = "the tokenizer's own template begins a text; rows of a batch are not padded"
BOOKKEEPING: Final = "names who wrote the file, and how to load it there"
STATE_DTYPE: Final = "the state's type is the user's choice (ReplayConfig.state_dtype)"
VISION: Final = "describes the vision part of a multimodal model, of which the text part alone is run"
TEXT_POSITIONS: Final = "places images and video; the positions of a text are the same in all its axes"

MTP_WEIGHTS: Final = "not among the tensors of a multi-token prediction head of this model"
MTP_LAYERS: Final = "a multi-token prediction head with {}; this version runs those of one layer"
MTP_EMBEDDINGS: Final = "a multi-token prediction head with an embedding of its own; this version runs those without"
MTP_PATTERN: Final = "a multi-token prediction head with the layers {}; this version runs attention and MLP alone"
MTP_INCOMPLETE: Final = "no whole multi-token prediction head of this model: {}"
VISION_WEIGHTS: Final = "the vision part of a multimodal model; the text part alone is run"
