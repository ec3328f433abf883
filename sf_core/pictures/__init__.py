"""Pictures in observations: how a policy sees them, and how they stand among tokens. Imports no tensor library."""
