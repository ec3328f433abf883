"""Chat: messages to token ids, and sampled text to messages, by the tokenizer and chat template of a model
folder. Knows no sessions."""
