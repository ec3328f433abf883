"""Pictures in prompts: how a policy sees them, and how they stand among tokens. Needs no tensor library."""
