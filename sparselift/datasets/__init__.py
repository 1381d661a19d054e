"""Real and synthetic training data, as batches in the layout of DLRM."""

from sparselift.datasets.criteo import read_criteo
from sparselift.datasets.synthetic import CRITEO_KAGGLE, MLPERF_DCNV2, Shape, click_batches
from sparselift.datasets.tabular import Batch, Tabular

__all__ = ["CRITEO_KAGGLE", "MLPERF_DCNV2", "Batch", "Shape", "Tabular", "click_batches", "read_criteo"]
