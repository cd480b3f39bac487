"""What a program runs on: chips, memory, links. Never sees a program."""

from meshplan.machine._collectives import collective_rate as collective_rate
from meshplan.machine._collectives import collective_seconds as collective_seconds
from meshplan.machine._detect import device_order as device_order
from meshplan.machine._links import LinkShare as LinkShare
from meshplan.machine._links import axis_levels as axis_levels
from meshplan.machine._links import legal_mesh_shapes as legal_mesh_shapes
from meshplan.machine._links import link_groups as link_groups
from meshplan.machine._links import spans_levels as spans_levels
from meshplan.machine._machine import Aot as Aot
from meshplan.machine._machine import Chip as Chip
from meshplan.machine._machine import Level as Level
from meshplan.machine._machine import LinkDim as LinkDim
from meshplan.machine._machine import Machine as Machine
from meshplan.machine._machine import NoAot as NoAot
