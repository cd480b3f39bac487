"""Legal strategies and the graph of decisions."""

from meshplan.strategy._choices import UNREDUCED as UNREDUCED
from meshplan.strategy._choices import UNUSED as UNUSED
from meshplan.strategy._choices import Choices as Choices
from meshplan.strategy._choices import enumerate_choices as enumerate_choices
from meshplan.strategy._classes import DimClasses as DimClasses
from meshplan.strategy._classes import dim_classes as dim_classes
from meshplan.strategy._classes import value_dims as value_dims
from meshplan.strategy._graph import Edge as Edge
from meshplan.strategy._graph import Graph as Graph
from meshplan.strategy._graph import Node as Node
from meshplan.strategy._graph import Reduction as Reduction
from meshplan.strategy._graph import build_graph as build_graph
from meshplan.strategy._graph import kernels as kernels
from meshplan.strategy._names import bound_places as bound_places
from meshplan.strategy._sums import Hoists as Hoists
from meshplan.strategy._templates import TEMPLATES as TEMPLATES
from meshplan.strategy._templates import TENSOR_TEMPLATES as TENSOR_TEMPLATES
from meshplan.strategy._templates import template_keep as template_keep
from meshplan.strategy._tie import Ties as Ties
from meshplan.strategy._tie import tie as tie
