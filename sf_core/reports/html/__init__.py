"""The page of `sf report`: its data, its size and its assets. Other reports compute the figures."""
