"""Samplers: rules that choose the parameters of the next trial, and their seeds."""
