"""Coordinator of a search: hands out trials, handles their ends, lets idle blocks help at the end; pure."""
