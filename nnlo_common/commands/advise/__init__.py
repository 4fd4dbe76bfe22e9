"""`nnlo advise`, and `advise` of the plug-ins: a probe, its advice in words, one page with plots."""
