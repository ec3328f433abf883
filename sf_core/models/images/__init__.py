"""Images in prompts: their preprocessing, and their placeholders among token ids. Needs no tensor library."""
