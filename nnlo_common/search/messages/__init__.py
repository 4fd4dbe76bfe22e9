"""Messages between the ranks of a search, and the channels that carry them."""
