"""What a user adds to a program: names of dims, paths for pins, workloads."""

from meshplan.hints._decorators import TAG_PREFIX as TAG_PREFIX
from meshplan.hints._decorators import dims as dims
from meshplan.hints._decorators import params as params
from meshplan.hints._decorators import params_of as params_of
from meshplan.hints._decorators import tagged_names as tagged_names
from meshplan.hints._names import named_leaves as named_leaves
from meshplan.hints._paths import argument_names as argument_names
from meshplan.hints._paths import find as find
from meshplan.hints._paths import leaf_paths as leaf_paths
from meshplan.hints._paths import match as match
from meshplan.hints._paths import nearest_paths as nearest_paths
from meshplan.hints._workload import Workload as Workload
