"""Pooling "max" by its definition, for both parts of the certificate."""

from __future__ import annotations

import torch
from torch import Tensor


def first_maxima(rows: Tensor, bag_of: Tensor, keep: Tensor, bags: int) -> tuple[Tensor, Tensor]:
    """The maximum of every bag, column by column, and which lookup it came from: of equal ones the first.

    Parameters
    ----------
    rows    (K, D) what was looked up, no NaN
    bag_of  (K,) the bag of each lookup
    keep    (K,) whether it counts

    Returns
    -------
    (B, D) maxima, 0 in a bag where nothing counts, and (K, D) whether a lookup is where one came from
    """
    count, dim = rows.shape
    place = bag_of[:, None].expand(count, dim)
    counted = torch.where(keep[:, None], rows, -torch.inf)
    found = rows.new_full((bags, dim), -torch.inf).scatter_reduce(0, place, counted, "amax")
    position = torch.arange(count)[:, None].expand(count, dim)
    candidate = torch.where(keep[:, None] & (counted == found[bag_of]), position, count)
    first = torch.full((bags, dim), count).scatter_reduce(0, place, candidate, "amin")
    return torch.where(first < count, found, 0.0), (candidate == first[bag_of]) & (candidate < count)
