"""Problem to Solution: arrays in, a choice per node out."""

from meshplan.solve._evaluate import evaluate as evaluate
from meshplan.solve._evaluate import exhaustive as exhaustive
from meshplan.solve._instance import Instance as Instance
from meshplan.solve._instance import evaluate_instance as evaluate_instance
from meshplan.solve._instance import instance_names as instance_names
from meshplan.solve._instance import load_instance as load_instance
from meshplan.solve._instance import read_instance as read_instance
from meshplan.solve._instance import solve_instance as solve_instance
from meshplan.solve._solve import minimum_peak as minimum_peak
from meshplan.solve._solve import solve as solve
