"""A tokenizer for models built from scratch: byte-level BPE trained on an environment's text, in a second."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

END = "<|end|>"
PAD = "<|pad|>"
#: One token for each role, so that a turn costs two tokens of format, and the words reasoning models use.
SPECIAL = (PAD, END, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<think>", "</think>")

#: Tells of tools by names alone, as `look(at), go(to)`: a small model reads no schemas.
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{% set f = tool.function or tool %}"
    "{{ '<|system|>' if loop.first else ', ' }}"
    "{{ f.name }}({{ ((f.parameters or {}).properties or {}) | join(', ') }})"
    "{% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}<|assistant|>{{ message.content }}<|end|>"
    "{% else %}<|{{ message.role }}|>{{ message.content }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_tokenizer(texts: Iterable[str], *, vocab_size: int, max_context: int, split_digits: bool = False) -> Any:
    """Train on `texts`; any other text still encodes, byte by byte.

    Args:
        texts: what it is to read.
        vocab_size: most tokens.
        max_context: of the model.
        split_digits: whether each digit is a token of its own.

    Returns:
        a PreTrainedTokenizerFast with a chat template and END as its end-of-sequence token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    core.pre_tokenizer = pre_tokenizers.Sequence([digits, pieces]) if split_digits else pieces
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        model_max_length=max_context,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
