"""Real and synthetic training data, as batches in the layout of DLRM."""

from sparselift.datasets.baskets import read_baskets
from sparselift.datasets.criteo import read_criteo
from sparselift.datasets.flights import read_flights
from sparselift.datasets.synthetic import CRITEO_KAGGLE, MLPERF_DCNV2, Shape, click_batches
from sparselift.datasets.tabular import Batch, Ragged, Tabular

__all__ = ["CRITEO_KAGGLE", "MLPERF_DCNV2", "Batch", "Ragged", "Shape", "Tabular", "click_batches", "read_baskets", "read_criteo",
           "read_flights"]
