"""The coordinator of a search: which trial begins next, what its end means, who helps at the end; pure."""
