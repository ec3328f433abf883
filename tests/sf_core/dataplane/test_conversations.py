from __future__ import annotations

from copy import deepcopy

from hypothesis import given
from hypothesis import strategies as st

from sf_core.dataplane.conversations import NUM_KEPT, Conversation, Conversations
from sf_core.dataplane.messages import Message, chain_keys
from tests.sf_core.dataplane.conversations import FIND, user


@given(st.lists(st.tuples(st.integers(0, 40), st.lists(st.sampled_from("abc"), max_size=3)), max_size=60))
def test_keys_are_those_of_the_whole_request_whatever_was_asked_before(
    requests: list[tuple[int, list[str]]],
) -> None:
    conversations, asked = Conversations(), [[user("start")]]
    for shared, texts in requests:
        before = asked[shared % len(asked)]
        messages = [*before[: 1 + shared % len(before)], *map(user, texts)]
        asked.append(messages)
        assert conversations.recall([FIND], deepcopy(messages)).keys == chain_keys([FIND], messages)


def test_only_the_latest_conversations_are_kept() -> None:
    conversations = Conversations()
    for i in range(3 * NUM_KEPT):
        conversations.recall([], [user(str(i))])
    assert len(conversations._recent) == NUM_KEPT


def test_a_template_is_given_answers_as_they_were_recorded() -> None:
    sent: Message = {"role": "assistant", "content": "said"}
    recorded = {**sent, "reasoning_content": "why"}
    conversation = Conversation(b"")
    conversation.extend([user("a"), sent, user("b")])
    conversation.record_answer(1, recorded)
    assert conversation.recorded() == [user("a"), recorded, user("b")]
    assert conversation.num_shared([user("a"), sent, user("b")]) == 3
    assert conversation.beginning(2).recorded() == [user("a"), recorded]
