"""Chat templates for models that have none, and control tokens that their tokenizers lack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf.errors import ModelError, boundary, nearest

#: Templates by name. `plain` needs no token but the one that ends a text.
TEMPLATES = {
    "plain": (
        "{% for message in messages %}"
        "{% if message.role == 'system' %}{{ message.content }}\n\n"
        "{% elif message.role == 'assistant' %}Assistant:\n{{ message.content }}{{ eos_token }}\n\n"
        "{% else %}{{ message.role | capitalize }}:\n{{ message.content }}\n\n{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt %}Assistant:\n{% endif %}"
    ),
    "chatml": (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}
#: Tokens that a template needs to be tokens of their own.
_NEEDS = {"chatml": ("<|im_start|>", "<|im_end|>")}


def give_template(tokenizer: Any, template: Path | None, where: str) -> None:
    """Give `tokenizer` the template of a recipe, and a padding token where it has none.

    Args:
        tokenizer: changed in place.
        template: a name of `TEMPLATES`, or a file of Jinja; None keeps its own.
        where: what holds the model, for errors.

    Raises:
        ModelError: there is no template, no such name or file, or a token that it needs is missing.
    """
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.unk_token or tokenizer.bos_token or tokenizer.eos_token
    if template is None and tokenizer.chat_template is None:
        raise ModelError(
            "the tokenizer has no chat template",
            where=where,
            got="a base model, perhaps",
            expected="chat_template.jinja or a chat_template in tokenizer_config.json",
            hint="set policy.template: plain, or the path of a Jinja file, or use an instruction-tuned model",
        )
    if template is None:
        return
    name = str(template)
    tokenizer.chat_template = TEMPLATES.get(name) or _of_file(template)
    known = tokenizer.get_vocab()
    if missing := [token for token in _NEEDS.get(name, ()) if token not in known]:
        raise ModelError(
            "the tokenizer lacks tokens of this template",
            where="policy.template",
            got=f"{name}, without {', '.join(missing)}",
            expected="a token for each of these",
            hint="use template: plain, which needs none",
        )


def _of_file(path: Path) -> str:
    if not path.is_file():
        raise ModelError(
            "there is no such template",
            where="policy.template",
            got=str(path),
            expected=f"{', '.join(TEMPLATES)}, or the path of a Jinja file",
            hint=nearest(str(path), TEMPLATES) or "give the path from here, or beside the recipe",
        )
    with boundary(ModelError, where=f"policy.template {path}"):
        return path.read_text("utf-8")
