"""meshplan: plan how a JAX step is sharded over a machine, with reasons, before running it."""

from meshplan._api import Plan as Plan
from meshplan._api import plan as plan
from meshplan._options import Options as Options
from meshplan.core import MeshplanError as MeshplanError
from meshplan.hints import Workload as Workload
from meshplan.hints import dims as dims
from meshplan.hints import params as params
from meshplan.machine import Machine as Machine
