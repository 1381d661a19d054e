"""Click prediction on a Criteo log: DLRM with the layers of the official script, natively and under two plans.

    pip install '.[tune,examples]' && python examples/criteo.py --data path/to/train.txt --limit 100000
"""

from __future__ import annotations

from pathlib import Path

from _common import TRAIN_SHARE, Task, options, run

from sparselift.datasets import read_criteo


def main() -> None:
    # Training amplifies rounding: at a rate of 0.1, one last bit in one table moves the loss by 1e-3 within five epochs, natively too.
    parser = options(__doc__, batch_size=256, epochs=5, lr=0.05)
    parser.add_argument("--data", type=Path, required=True, help="plain or gzip: label, 13 integers, 26 hexadecimal ids")
    args = parser.parse_args()
    train, test = read_criteo(args.data, limit=args.limit, max_rows=1_000_000).split(TRAIN_SHARE)
    run(Task.of("criteo", train, test, args.batch_size, bottom=(512, 256, 64), top=(512, 256, 1)), args)


if __name__ == "__main__":
    main()
