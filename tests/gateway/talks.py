"""Random conversations with tools over each wire, by the real client libraries, against a model that calls tools."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from environments.games.key_door import Keyhole
from rlhf.data import SamplingParams, Trajectory
from rlhf.gateway.agent import ExternalAgent
from rlhf.gateway.environment import External
from rlhf.gateway.programs import programs_of
from rlhf.inference.embedded.engine import TransformersEngine
from rlhf.rollout.group import run_groups
from rlhf.rollout.limits import Limits
from rlhf.rollout.renderer import Renderer

#: Writes tools where it writes the beginning, as the templates of model families do.
TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
#: Each is one token, so that a model without training says it now and then; the spelling is nobody's canonical one.
PHRASES = (
    '<tool_call>{"name":"look",  "arguments":{"at": "the  door"}}</tool_call>',
    '<tool_call>{"arguments": {"b": [1, 2], "a": 1.50}, "name": "add"}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {}}</tool_call>',
    "<tool_call>{broken</tool_call>",
    *("<think>", "</think>", " hm", " so", "ab", "b", "a", " abab", " ", "  "),
)
TOOLS = {
    "look": {"type": "object", "properties": {"at": {"type": "string"}}},
    "add": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "array"}}},
}


@cache
def tokenizer() -> Any:
    """Bytes, and whole phrases as tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    core.add_tokens([AddedToken(phrase, normalized=False, special=False) for phrase in PHRASES])
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    made.chat_template = TEMPLATE
    return made


def model(seed: int = 0, head_dim: int = 16) -> Any:
    """A model that says phrases and ends more often than it spells."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer()),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head_dim,
        max_position_embeddings=8192,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    made = LlamaForCausalLM(config).eval()
    with torch.no_grad():  # a part of each state that never changes makes bytes, which spell no text, seldom
        made.model.embed_tokens.weight[:, 0] = 8.0
        made.lm_head.weight[:257, 0] = -2.0
    return made


class Delayed(TransformersEngine):
    """An engine that takes its time, and remembers what was given up or released."""

    delay_s = 0.0

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.given_up = self.begun = 0
        self.names, self.released = set[str](), set[str]()

    async def release(self, session: str) -> None:
        await super().release(session)
        self.released.add(session)

    async def generate(self, prompt: Any, params: Any, session: str = "") -> Any:
        self.begun += 1
        self.loop = asyncio.get_running_loop()
        self.names.add(session)
        try:
            await asyncio.sleep(self.delay_s)
            return await super().generate(prompt, params, session)
        except asyncio.CancelledError:
            self.given_up += 1
            raise


class Ends:
    """Tokens that end a reply beside the template's own, so that most replies end by themselves."""

    eos_token_id = tuple(tokenizer().convert_tokens_to_ids(text) for text in (" so", "ab", "a", *PHRASES[:2]))


@dataclass
class World:
    """A model, its engine, and an environment that outside agents come to."""

    limits: Limits = field(
        default_factory=lambda: Limits(
            max_turns=30, max_tokens=24, max_generations_per_turn=4, start_timeout_s=90, max_concurrent=3
        )
    )
    agent: ExternalAgent = field(default_factory=ExternalAgent)
    settings: dict[str, Any] = field(default_factory=dict)
    model: Any = field(default_factory=model)
    delay_s: float = 0.0
    engine: Any = None
    starts: Callable[[], Awaitable[Any]] | None = None
    """Makes another engine than one of this process."""

    @cached_property
    def environment(self) -> External:
        """That of the attempts."""
        return External(**{"environment": Keyhole(), **self.settings})

    def play(
        self, work: Callable[[dict[str, Any]], None], n: int, *, n_threads: int = 3, **how: Any
    ) -> list[Trajectory]:
        """Have `work` make `n` attempts, each of which it is given as the gateway tells of it."""
        environment = self.environment
        stopped = threading.Event()
        threads = [
            threading.Thread(target=_come, args=(environment, work, stopped), daemon=True) for _ in range(n_threads)
        ]

        async def body() -> list[list[Trajectory]]:
            engine = self.engine = await self.starts() if self.starts else Delayed(self.model, max_context=8192)
            engine.delay_s = self.delay_s
            tasks = list(environment.tasks("train"))[:n]
            renderer = Renderer(tokenizer(), generation_config=Ends())
            parts = (environment, self.agent, engine, renderer, self.limits, SamplingParams())
            for thread in threads:
                thread.start()
            try:
                return await run_groups(tasks, *parts, group_size=1, seed=0, **how)
            finally:
                stopped.set()
                await engine.close()

        try:
            return [trajectory for group in asyncio.run(body()) for trajectory in group]
        finally:
            environment.close()
            for thread in threads:
                thread.join(20)


def post(url: str, key: str, body: Any = None) -> Any:
    """Send JSON with a key."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body or {}).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def _come(environment: External, work: Callable[[dict[str, Any]], None], stopped: threading.Event) -> None:
    """Ask for one attempt after the other."""
    while not stopped.is_set():
        gateway = programs_of(environment).gateway
        if gateway is None:
            time.sleep(0.01)
            continue
        try:
            mine = post(f"{gateway.url}/sessions", gateway.key)
        except urllib.error.HTTPError as error:
            assert error.code == 429 or stopped.is_set(), error
            continue
        except OSError:
            return
        try:
            work(mine)
        except Exception as error:
            try:
                post(f"{mine['url']}/fail", mine["key"], {"message": f"{type(error).__name__}: {error}"})
            except OSError:
                return


class Talk:
    """One random conversation; it counts the requests that go on from another history than the gateway knows."""

    def __init__(self, mine: dict[str, Any], seed: int) -> None:
        self.mine, self.rng = mine, random.Random(seed)
        self.tools: dict[str, str] = dict.fromkeys(TOOLS, "Does it.") if self.rng.random() < 0.8 else {}
        self.n_forks = self.n_results = 0
        self.differs = self.was_cut = False
        self.history: list[Any] = []
        self.before: list[Any] = []
        self.calls: list[tuple[str, str, Any]] = []
        self.first = self.rng.choice(["", "You act."])

    def run(self) -> None:
        """Talk for some turns, now and then with a changed history."""
        self.say("Begin.")
        for _ in range(self.rng.randint(2, 5)):
            self.turn()
            chance = self.rng.random()
            if chance < 0.1:
                self.history, self.differs = self.before, True  # another answer to the same prompt
                continue
            if chance < 0.2:
                self.first, self.differs = f"You act {self.rng.random()}.", True
            elif chance < 0.3 and self.tools:
                self.tools, self.differs = dict.fromkeys(TOOLS, f"Does it {self.rng.random()}."), True
            self.differs = self.differs or self.was_cut
            self.follow()
        self.turn()
        told = {"reward": float(self.n_forks), "success": True}
        post(f"{self.mine['url']}/finish", self.mine["key"], told)

    def turn(self) -> None:
        """Ask for a reply and put it behind the history."""
        self.n_forks += self.differs
        self.differs, self.before = False, list(self.history)
        self.ask(stream=self.rng.random() < 0.5)

    def follow(self) -> None:
        """Answer the calls of the last reply, or say something."""
        if self.calls:
            self.n_results += len(self.calls)
            self.results([f"{name}: {self.rng.choice(PHRASES)} {self.rng.randint(0, 9)}" for _, name, _ in self.calls])
        else:
            self.say(f"Go on {self.rng.choice(PHRASES)}.")

    def spelled(self, arguments: Any) -> str:
        """Arguments in JSON, in one of the ways in which a client may write them again."""
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
        how: Any = self.rng.choice([{}, {"separators": (",", ":")}, {"indent": 1}, {"sort_keys": True}])
        return json.dumps(found, **how)


class OpenAITalk(Talk):
    """By the client of OpenAI."""

    @cached_property
    def client(self) -> Any:
        import openai

        return openai.OpenAI(base_url=self.mine["base_url"], api_key=self.mine["key"])

    def say(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})


class ChatTalk(OpenAITalk):
    """Over chat completions, by the client of OpenAI."""

    def results(self, texts: list[str]) -> None:
        for (name, _, _), text in zip(self.calls, texts, strict=True):
            self.history.append({"role": "tool", "tool_call_id": name, "content": text})

    def ask(self, *, stream: bool) -> None:
        given: dict[str, Any] = {"model": "m", "messages": [*self.system(), *self.history]}
        if self.tools:
            given["tools"] = [
                {"type": "function", "function": {"name": k, "description": v, "parameters": TOOLS[k]}}
                for k, v in self.tools.items()
            ]
        client = self.client
        if stream:
            content, self.calls, finish = gathered(client.chat.completions.create(**given, stream=True))
        else:
            choice = client.chat.completions.create(**given).choices[0]
            content, finish = choice.message.content, choice.finish_reason
            self.calls = [(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]
        self.was_cut = finish == "length"
        assert bool(self.calls) == (finish == "tool_calls")
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self.calls:
            message["tool_calls"] = [
                {"id": i, "type": "function", "function": {"name": n, "arguments": self.spelled(a)}}
                for i, n, a in self.calls
            ]
        self.history.append(message)

    def system(self) -> list[Any]:
        return [{"role": "system", "content": self.first}] if self.first else []


def gathered(chunks: Any) -> tuple[str, list[tuple[str, str, Any]], str]:
    """Text, calls and finish of a stream of chat completions."""
    text, finish, calls = "", "", {}
    for chunk in chunks:
        delta, finish = chunk.choices[0].delta, chunk.choices[0].finish_reason or finish
        text += delta.content or ""
        for call in delta.tool_calls or ():
            name, called, arguments = calls.get(call.index, ("", "", ""))
            more = call.function.arguments or ""
            calls[call.index] = (call.id or name, call.function.name or called, arguments + more)
    return text, list(calls.values()), finish


class ResponsesTalk(OpenAITalk):
    """Over responses, by the client of OpenAI; now and then only what is new is sent."""

    last, n_known = "", 0

    def results(self, texts: list[str]) -> None:
        for (name, _, _), text in zip(self.calls, texts, strict=True):
            self.history.append({"type": "function_call_output", "call_id": name, "output": text})

    def ask(self, *, stream: bool) -> None:
        from openai.types.responses import ResponseCompletedEvent, ResponseIncompleteEvent

        given: dict[str, Any] = {"model": "m", "input": list(self.history)}
        if self.last and self.n_known <= len(self.history) and self.rng.random() < 0.5:
            given |= {"previous_response_id": self.last, "input": self.history[self.n_known :]}
        if self.first:
            given["instructions"] = self.first
        if self.tools:
            given["tools"] = [
                {"type": "function", "name": k, "description": v, "parameters": TOOLS[k], "strict": False}
                for k, v in self.tools.items()
            ]
        client = self.client
        if stream:
            ends = (ResponseCompletedEvent, ResponseIncompleteEvent)
            events = client.responses.create(**given, stream=True)
            found = next(e.response for e in events if isinstance(e, ends))
        else:
            found = client.responses.create(**given)
        self.was_cut = found.status == "incomplete"
        items = [item.model_dump(exclude_none=True) for item in found.output]
        self.calls = [(i["call_id"], i["name"], i["arguments"]) for i in items if i["type"] == "function_call"]
        for item in items:
            if item["type"] == "function_call":
                item["arguments"] = self.spelled(item["arguments"])
        kept = [item for item in items if item["type"] != "reasoning" or self.rng.random() < 0.5]
        self.history += kept
        self.last, self.n_known = found.id, len(self.history)


class MessagesTalk(Talk):
    """Over messages, by the client of Anthropic."""

    @cached_property
    def client(self) -> Any:
        import anthropic

        return anthropic.Anthropic(base_url=self.mine["url"], api_key=self.mine["key"])

    def say(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def results(self, texts: list[str]) -> None:
        blocks = [
            {"type": "tool_result", "tool_use_id": name, "content": text}
            for (name, _, _), text in zip(self.calls, texts, strict=True)
        ]
        self.history.append({"role": "user", "content": blocks})

    def ask(self, *, stream: bool) -> None:
        given: dict[str, Any] = {"model": "m", "messages": list(self.history), "max_tokens": 100}
        if self.first:
            given["system"] = self.first
        if self.tools:
            given["tools"] = [{"name": k, "description": v, "input_schema": TOOLS[k]} for k, v in self.tools.items()]
        client = self.client
        if stream:
            with client.messages.stream(**given) as events:
                found = events.get_final_message()
        else:
            found = client.messages.create(**given)
        self.was_cut = found.stop_reason == "max_tokens"
        self.calls = [(b.id, b.name, b.input) for b in found.content if b.type == "tool_use"]
        assert bool(self.calls) == (found.stop_reason == "tool_use")
        kept = [b.model_dump(include={"type", "text", "id", "name", "input"}, exclude_none=True) for b in found.content]
        self.history.append({"role": "assistant", "content": kept})


#: Wire -> who talks over it.
TALKS: dict[str, type[Talk]] = {"chat": ChatTalk, "responses": ResponsesTalk, "messages": MessagesTalk}
