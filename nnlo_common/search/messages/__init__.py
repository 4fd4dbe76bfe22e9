"""Messages between the ranks of a search, and channels that carry them."""
