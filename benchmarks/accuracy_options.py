"""Command line of the accuracy benchmarks."""

from __future__ import annotations

import argparse


def options(text):
    """Parse the command line; `text` is the docstring of the script."""
    return parser_of(text, "a folder with the full Fashion-MNIST").parse_args()


def parser_of(text, data):
    """Return the parser; `data` is the help of --data."""
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument(
        "--algorithm",
        choices=["downpour", "easgd", "gem"],
        default="downpour",
        help="all equal in one process",
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1, 2, 3], help="seeds of the weights and the order"
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--optimizer", choices=["sgd", "adam"], default="sgd", help="gem needs sgd")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="falls to 0 as a cosine")
    parser.add_argument("--warmup", type=float, default=1.0, help="the share of that rate in the first epoch")
    parser.add_argument("--momentum", type=float, default=0.9, help="of sgd; beta1 of adam")
    parser.add_argument("--every", type=int, help="steps between exchanges")
    parser.add_argument("--lag", type=int, help="exchanges in flight while a worker trains on")
    parser.add_argument("--group-size", type=int, help="ranks of each worker; each takes a batch of its own")
    parser.add_argument("--kappa", type=float, help="for gem: how much energy the workers may have")
    parser.add_argument("--wire", help="how numbers travel between workers and servers")
    parser.add_argument("--data", help=data)
    parser.add_argument(
        "--validation",
        type=int,
        default=0,
        help="hold back the last N training samples and measure on them instead of the test set",
    )
    return parser
