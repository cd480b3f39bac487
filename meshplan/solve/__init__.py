"""Problem to Solution: arrays in, a choice per node out."""

from meshplan.solve._evaluate import evaluate as evaluate
from meshplan.solve._evaluate import exhaustive as exhaustive
from meshplan.solve._solve import minimum_peak as minimum_peak
from meshplan.solve._solve import solve as solve
