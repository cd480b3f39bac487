"""Seconds and bytes of strategies: compute, collectives, reshard paths, memory over time."""

from meshplan.cost._combine import SMALL_BYTES as SMALL_BYTES
from meshplan.cost._combine import SUMS as SUMS
from meshplan.cost._compute import ComputePart as ComputePart
from meshplan.cost._compute import compute_parts as compute_parts
from meshplan.cost._compute import modelled_compute_seconds as modelled_compute_seconds
from meshplan.cost._compute import seconds_by_op as seconds_by_op
from meshplan.cost._emission import Emission as Emission
from meshplan.cost._emission import runs_on_shards as runs_on_shards
from meshplan.cost._model import TRAFFIC as TRAFFIC
from meshplan.cost._model import Keep as Keep
from meshplan.cost._model import MeshModel as MeshModel
from meshplan.cost._model import Space as Space
from meshplan.cost._predict import Chosen as Chosen
from meshplan.cost._predict import Held as Held
from meshplan.cost._predict import Prediction as Prediction
from meshplan.cost._predict import describe as describe
from meshplan.cost._problem import FORBIDDEN as FORBIDDEN
from meshplan.cost._problem import Problem as Problem
from meshplan.cost._problem import Solution as Solution
from meshplan.cost._rates import Rates as Rates
from meshplan.cost._reshard import Step as Step
from meshplan.cost._reshard import reshard_path as reshard_path
from meshplan.cost._timeline import Stretch as Stretch
from meshplan.cost._timeline import timeline_of as timeline_of
