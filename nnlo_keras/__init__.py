"""nnlo for keras."""
