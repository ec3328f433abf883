"""Networks and tokenizers that engines and trainers share, and sampling. Serves and trains nothing."""
