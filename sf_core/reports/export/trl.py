"""The format of TRL."""

from __future__ import annotations

from sf_core.reports.export.conversations import SAMPLED_UNKNOWN, Format, Row, StoredChat


class Trl(Format):
    """TRL's conversational prompt-completion type: messages before the first trained one, and the rest;
    huggingface.co/docs/trl/dataset_formats (docs/source/dataset_formats.md of huggingface/trl). Its trainers
    take `tools` as JSON text too, which `datasets` leaves as it is. Files of images are in `images`."""

    def convert(self, conversation: StoredChat) -> Row | str:
        if conversation.trained is None:
            return SAMPLED_UNKNOWN
        first = conversation.trained.index(True) if True in conversation.trained else 0
        if not first:
            return "no prompt before a sampled answer"
        messages, _ = self.render(conversation)
        images = {} if conversation.images is None else {"images": conversation.images}
        facts = {"tools": conversation.tools, **images, **conversation.facts}
        return {"prompt": messages[:first], "completion": messages[first:], **facts}
