"""What the benchmarks of accuracy can be told: the same."""

from __future__ import annotations

import argparse


def options(text):
    """Read the command line; `text` is what the script says of itself."""
    return parser_of(text, "a folder with the full Fashion-MNIST").parse_args()


def parser_of(text, data):
    """What reads the command line; `data` says what that option is."""
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument(
        "--algorithm", choices=["downpour", "easgd", "gem"], default="downpour", help="alone all are the same"
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1, 2, 3], help="of the weights and the order"
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--optimizer", choices=["sgd", "adam"], default="sgd", help="gem needs sgd")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="falls to 0 as a cosine")
    parser.add_argument("--warmup", type=float, default=1.0, help="the first epoch's share of that rate")
    parser.add_argument("--momentum", type=float, default=0.9, help="of sgd; beta1 of adam")
    parser.add_argument("--every", type=int, help="steps between exchanges")
    parser.add_argument("--lag", type=int, help="exchanges that may be under way while a worker trains on")
    parser.add_argument("--kappa", type=float, help="for gem: how much energy the workers may have")
    parser.add_argument("--data", help=data)
    parser.add_argument(
        "--validation",
        type=int,
        default=0,
        help="hold back so many of the last training samples and measure on them, not on those of the test",
    )
    return parser
