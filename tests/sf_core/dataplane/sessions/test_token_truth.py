"""Every sampled token is trained exactly once, whatever agents do to their histories, and although their
sessions are on disk now and then.

The nightly size is SF_TOKEN_TRUTH_EXAMPLES=10000.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from sf_core.dataplane.chat.messages import Message
from sf_core.dataplane.chat.tool_formats import Tool, ToolCall
from sf_core.dataplane.sessions.session import Prompt, Turn
from tests.bench.dataplane import conversations

EXAMPLES = int(os.environ.get("SF_TOKEN_TRUTH_EXAMPLES", "60"))
WORDS = ("the quick", "brown fox", "naïve café", "数学は楽しい", "42 and 30", "what is it?", "x" * 9)
STEPS = 14


@dataclass
class Conversation:
    messages: list[Message]
    tools: list[Tool]
    verbatim: bool = True
    """Whether the template renders every answer as it was sampled."""
    ids: list[int] = field(default_factory=list)
    """Token ids instead of messages, for an agent that sends ids."""

    def grown(self, *messages: Message, verbatim: bool = True) -> Conversation:
        return Conversation([*self.messages, *messages], self.tools, self.verbatim and verbatim)


class Conversations(RuleBasedStateMachine):
    @initialize(name=st.sampled_from(conversations.FAMILIES), seed=st.integers(0, 2**32))
    def start(self, name: str, seed: int) -> None:
        self.name = name
        self.rng = random.Random(seed)
        self.renderer = conversations.family(name)
        self.record = conversations.Record(self.renderer)
        self.undisturbed = conversations.Record(self.renderer)
        self.version = 0
        self.open = [Conversation([conversations.user("start")], [])]

    @rule(system=st.booleans(), tools=st.booleans(), text=st.sampled_from(WORDS))
    def spawn_sub_agent(self, system: bool, tools: bool, text: str) -> None:
        messages = [{"role": "system", "content": f"be {text}"}] if system else []
        tools = tools and self.name != "chatml"
        self.open.append(
            Conversation([*messages, conversations.user(text)], [conversations.FIND] if tools else [])
        )

    @rule()
    def publish_weights(self) -> None:
        self.version += 1

    @rule()
    def restart(self) -> None:
        before = conversations.state_of(self.record.session)
        self.record.restart()
        assert conversations.state_of(self.record.session) == before

    @rule(
        kind=st.sampled_from(["plain", "think", "call", "think_call", "schema"]),
        end=st.booleans(),
        text=st.data(),
    )
    def take_a_turn(self, kind: str, end: bool, text: Any) -> None:
        """Answer an open conversation and go on with a tool's result or a user's message."""
        conversation = self._pick()
        said = text.draw(st.sampled_from(WORDS))
        self._turn(conversation, kind, said, end)

    @rule(length=st.integers(0, 12), end=st.booleans())
    def babble(self, length: int, end: bool) -> None:
        """Answer with arbitrary ids: halves of characters, marks of calls and reasoning, none at all."""
        conversation = self._pick()
        size = self.renderer._tokenizer.get_vocab_size()
        ids = [self.rng.randrange(size) for _ in range(length)]
        ids = [token for token in ids if token not in self.renderer.stop_token_ids]
        turn = self._answer(self._ask(conversation), ids, end=end)
        self.open.append(conversation.grown(turn.message, conversations.user("pardon?"), verbatim=False))

    @rule(count=st.integers(2, 4))
    def sample_several(self, count: int) -> None:
        """Sample several turns of one prompt, as n > 1 or retries do; any of them may be continued."""
        conversation = self._pick()
        for i in range(count):
            self._turn(conversation, "plain", f"{self.rng.choice(WORDS)} {i % 2}", True)

    @rule(at=st.integers(0, 30), text=st.sampled_from(WORDS))
    def edit_history(self, at: int, text: str) -> None:
        conversation = self._pick()
        messages = list(conversation.messages)
        at %= len(messages)
        messages[at] = {"role": messages[at]["role"], "content": f"edited {text}"}
        if messages[at]["role"] == "tool":
            return
        messages = messages[: at + 1] + [conversations.user("go on")] * (messages[at]["role"] != "user")
        self.open.append(Conversation(messages, conversation.tools, conversation.verbatim))

    @rule(text=st.sampled_from(WORDS))
    def compact(self, text: str) -> None:
        conversation = self._pick()
        system = [m for m in conversation.messages[:1] if m["role"] == "system"]
        tail = conversation.messages[-1:] if conversation.messages[-1]["role"] == "user" else []
        self.open.append(
            Conversation([*system, conversations.user(f"so far: {text}"), *tail], conversation.tools)
        )

    @rule(text=st.sampled_from(WORDS))
    def interrupt_the_user(self, text: str) -> None:
        """Add a message after one that was never answered."""
        conversation = self._pick()
        if conversation.messages[-1]["role"] == "user":
            self.open.append(conversation.grown(conversations.user(text)))

    @rule(x=st.integers(0, 3))
    def force_a_call(self, x: int) -> None:
        conversation = self._pick()
        if not conversation.tools:
            return
        whole = conversations.call_text(self.name, x)
        cut = whole.index("find")
        prompt = self._open(conversation, whole[:cut])
        plain = self.renderer.render(conversation.messages, conversation.tools)
        assert (
            not conversation.verbatim
            or conversations.shown(self.renderer, prompt.full_ids().tolist()) == plain + whole[:cut]
        )
        ids = conversations.odd_ids(self.renderer, whole[cut:], self.rng)
        call = ToolCall("find", {"x": x})
        turn = self._answer(prompt, ids, calls=[call])
        result = {"role": "tool", "content": "ok", "tool_call_id": turn.message["tool_calls"][0]["id"]}
        self.open.append(conversation.grown(turn.message, result))

    @rule(retokenise=st.booleans(), text=st.sampled_from(WORDS))
    def speak_in_ids(self, retokenise: bool, text: str) -> None:
        """Continue any turn as an agent that sends token ids, sometimes with the answer encoded anew."""
        asked, turn = self.rng.choice(self.record.turns) if self.record.turns else ([], None)
        answer = turn.ids.tolist() if turn is not None else []
        if retokenise and turn is not None:
            answer = self.renderer.encode(conversations.shown(self.renderer, answer)).tolist()
        ids = asked + answer + self.renderer.encode(text).tolist()
        prompt = self.record.session.open_prompt_from_ids(ids)
        self.undisturbed.session.open_prompt_from_ids(ids)
        assert prompt.full_ids().tolist() == ids
        assert self.record.session.open_prompt_from_ids(ids) is prompt
        self._answer(prompt, conversations.odd_ids(self.renderer, text, self.rng))

    def teardown(self) -> None:
        if hasattr(self, "record") and self.record.turns:
            assert conversations.state_of(self.record.session) == conversations.state_of(
                self.undisturbed.session
            )
            conversations.check(self.record)

    def _pick(self) -> Conversation:
        # the latest often: conversations are to become long
        return self.open[-1] if self.rng.random() < 0.6 else self.rng.choice(self.open)

    def _ask(self, conversation: Conversation) -> Prompt:
        prompt = self._open(conversation)
        if conversation.verbatim:
            rendered = self.renderer.render(conversation.messages, conversation.tools)
            assert conversations.shown(self.renderer, prompt.full_ids().tolist()) == rendered
        return prompt

    def _open(self, conversation: Conversation, forced: str = "") -> Prompt:
        prompts = []
        for record in (self.undisturbed, self.record):
            messages = [dict(message) for message in conversation.messages]
            tools = conversation.tools
            prompts.append(record.session.open_prompt(messages, tools, self.renderer, forced))
        return prompts[-1]

    def _answer(self, prompt: Prompt, ids: list[int], **options: Any) -> Turn:
        same = self.undisturbed.session.prompts[prompt.index]
        self.undisturbed.answer(same, ids, version=self.version, **options)
        return self.record.answer(prompt, ids, version=self.version, **options)

    def _turn(self, conversation: Conversation, kind: str, said: str, end: bool) -> None:
        prompt = self._ask(conversation)
        text = said
        calls = []
        if "think" in kind and self.name == "qwen3":
            text = f"<think>\nwhy {said}\n</think>\n\n{said}"
        if "call" in kind and conversation.tools and end:
            # reasoning beside a call is kept in the answer's text by the gateway: not shown here
            x = self.rng.randrange(4)
            text = conversations.call_text(self.name, x)
            calls = [ToolCall("find", {"x": x})]
        ids = conversations.odd_ids(self.renderer, text, self.rng)
        if not end:
            ids = ids[: self.rng.randrange(len(ids) + 1)]
        unparsed = int(kind == "call" and not calls)
        turn = self._answer(
            prompt, ids, calls=calls, unparsed=unparsed, end=end, grammar="g" * (kind == "schema")
        )
        content = turn.message["content"]
        verbatim = content == content.strip() and "\N{REPLACEMENT CHARACTER}" not in content
        if calls:
            call_id = turn.message["tool_calls"][0]["id"]
            following = {"role": "tool", "content": f"found {said}", "tool_call_id": call_id}
        else:
            following = conversations.user(f"next {len(self.open) % 5}")
        self.open.append(conversation.grown(turn.message, following, verbatim=verbatim))


TestConversations = pytest.mark.timeout(300 + EXAMPLES // 4)(Conversations.TestCase)
TestConversations.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
