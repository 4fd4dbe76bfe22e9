"""nnlo for torch."""
