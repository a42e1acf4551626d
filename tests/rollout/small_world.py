"""Small tokenizers, environments and agents for the tests of rollouts. Nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agents.base import History, PolicyHandle
from environments.base import Properties, StepResult
from rlhf.data import Action, Message, Role, Task

#: Every message in the same way; nothing is rewritten.
CHATML = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

#: Like that of Qwen3: earlier reasoning is removed, the last reply gets a think block, an empty one can be forced.
THINKING = (
    "{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}"
    "{%- set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.last %}"
    "{%- set mind = m.content.split('</think>')[0].split('<think>')[-1] if '</think>' in m.content else '' %}"
    "{{- '<think>\n' + mind.strip('\n') + '\n</think>\n\n' }}{% endif %}"
    "{{- said + '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{% endif %}"
    "{%- endif %}"
)

#: The header of a reply opens the think block.
OPENING_THINK = CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'")

#: Like that of Llama 2: a beginning of text, no header, white space before the end of turn, strict alternation.
INSTRUCT = (
    "{{- '<s>' }}{%- for m in messages %}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{%- if m.role == 'user' %}{{- '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{%- else %}{{- ' ' + m.content.strip() + ' </s>' }}{% endif %}{% endfor %}"
)

_TEXT = ["You are in the kitchen. There is a wooden door to the north.", "go north", "open the door", "look around"]


@cache
def tokenizer(template: str | None = CHATML, eos: str = "<|im_end|>") -> Any:
    """A byte-level BPE tokenizer of some 330 tokens."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        _TEXT * 4, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    )
    core.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>"])
    core.add_tokens([AddedToken(t, special=False, normalized=False) for t in ("<think>", "</think>")])
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos, pad_token="<|endoftext|>")
    made.chat_template = template
    return made


def user(text: str) -> Message:
    return Message(Role.USER, text)


@dataclass
class Counts:
    """What episodes did, over all of them."""

    started: int = 0
    closed: int = 0
    alive: int = 0
    most_alive: int = 0


INLINE = Properties(inline=True)
THREADS = Properties(thread_safe=True)
ONE_THREAD = Properties()


@dataclass(frozen=True)
class Corridor:
    """Walk `length` doors north. Every attempt is counted."""

    length: int = 3
    properties: Properties = INLINE
    counts: Counts = field(default_factory=Counts)

    def tasks(self, split: str) -> list[Task]:
        return [Task(f"corridor/{split}/{i}", seed=i, reference="secret") for i in range(8)]

    def start(self, task: Task) -> CorridorEpisode:
        return CorridorEpisode(self, task)


class CorridorEpisode:
    def __init__(self, environment: Corridor, task: Task) -> None:
        self.environment, self.task, self.place = environment, task, 0
        counts = environment.counts
        counts.started += 1
        counts.alive += 1
        counts.most_alive = max(counts.most_alive, counts.alive)
        self.opening = self._result(valid=True)

    async def step(self, action: str) -> StepResult:
        moved = action == "go north"
        self.place += moved
        return self._result(valid=moved or action == "look")

    async def close(self) -> None:
        self.environment.counts.closed += 1
        self.environment.counts.alive -= 1

    def _result(self, valid: bool) -> StepResult:
        at_end = self.place >= self.environment.length
        return StepResult(
            f"Room {self.place} of {self.task.seed}.",
            reward=float(at_end),
            terminated=at_end,
            state_key=f"room {self.place}",
            success=True if at_end else None,
            valid=valid,
            admissible_actions=("go north", "look"),
        )


@dataclass(frozen=True)
class Plain:
    """The shortest agent: says everything, takes the reply as it is; an empty reply is an error."""

    async def act(self, history: History, policy: PolicyHandle) -> Action:
        messages = [user(history.opening)]
        for turn in history.turns:
            messages += [Message(Role.ASSISTANT, turn.action.text, turn.generations[-1].token_ids), user(turn.reply)]
        reply = await policy.generate(messages)
        return Action(reply.text, (reply.generation,), None if reply.text else "Say something.")
