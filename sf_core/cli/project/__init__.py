"""`sf init`: writes a small project of the user's own, from the files in template/. Owns what is in it."""
