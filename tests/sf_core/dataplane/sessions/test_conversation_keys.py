from __future__ import annotations

from copy import deepcopy

from hypothesis import given
from hypothesis import strategies as st

from sf_core.dataplane.chat.messages import chain_keys
from sf_core.dataplane.sessions.conversation_keys import MAX_CONVERSATIONS, Conversations
from tests.bench.dataplane.conversations import FIND, user


@given(st.lists(st.tuples(st.integers(0, 40), st.lists(st.sampled_from("abc"), max_size=3)), max_size=60))
def test_keys_are_those_of_the_whole_request_whatever_was_asked_before(
    requests: list[tuple[int, list[str]]],
) -> None:
    conversations = Conversations()
    asked = [[user("start")]]
    for shared, texts in requests:
        before = asked[shared % len(asked)]
        messages = [*before[: 1 + shared % len(before)], *map(user, texts)]
        asked.append(messages)
        assert conversations.find_or_create([FIND], deepcopy(messages)).keys == chain_keys([FIND], messages)


def test_only_the_latest_conversations_are_kept() -> None:
    conversations = Conversations()
    for i in range(3 * MAX_CONVERSATIONS):
        conversations.find_or_create([], [user(str(i))])
    assert len(conversations._recent) == MAX_CONVERSATIONS
