"""Multi-hot bags: does a shopping basket hold the most common item, given the others? Natively and under two plans.

    pip install '.[tune,examples]' && python examples/baskets.py path/to/retail.dat

Takes any file in the FIMI format, a basket of item ids a line; http://fimi.uantwerpen.be/data has several.
"""

from __future__ import annotations

from pathlib import Path

from _common import TRAIN_SHARE, Task, options, run

from sparselift.datasets import read_baskets


def main() -> None:
    parser = options(__doc__, batch_size=1024, epochs=2, lr=0.1)
    parser.add_argument("data", type=Path, help="plain or gzip")
    args = parser.parse_args()
    train, test = read_baskets(args.data, limit=args.limit).split(TRAIN_SHARE)
    run(Task.of("baskets", train, test, args.batch_size, bottom=(64,), top=(64, 1)), args)


if __name__ == "__main__":
    main()
