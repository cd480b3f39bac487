"""Legal strategies and the graph of decisions."""

from meshplan.strategy._choices import UNREDUCED as UNREDUCED
from meshplan.strategy._choices import UNUSED as UNUSED
from meshplan.strategy._choices import Choices as Choices
from meshplan.strategy._choices import enumerate_choices as enumerate_choices
from meshplan.strategy._graph import Edge as Edge
from meshplan.strategy._graph import Graph as Graph
from meshplan.strategy._graph import Node as Node
from meshplan.strategy._graph import Reduction as Reduction
from meshplan.strategy._graph import build_graph as build_graph
from meshplan.strategy._tie import Ties as Ties
from meshplan.strategy._tie import tie as tie
