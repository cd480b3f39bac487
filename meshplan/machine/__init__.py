"""What a program runs on: chips, memory, links. Never sees a program."""

from meshplan.machine._algorithms import CollectiveLine as CollectiveLine
from meshplan.machine._algorithms import CollectiveTime as CollectiveTime
from meshplan.machine._algorithms import collective_lines as collective_lines
from meshplan.machine._algorithms import collective_time as collective_time
from meshplan.machine._calibrate import Calibration as Calibration
from meshplan.machine._calibrate import calibrate as calibrate
from meshplan.machine._calibrate import process_clock as process_clock
from meshplan.machine._chip import Chip as Chip
from meshplan.machine._chip import ChipGroup as ChipGroup
from meshplan.machine._chip import KernelFigures as KernelFigures
from meshplan.machine._chip import RemoteMemory as RemoteMemory
from meshplan.machine._collectives import collective_rate as collective_rate
from meshplan.machine._collectives import collective_seconds as collective_seconds
from meshplan.machine._detect import device_order as device_order
from meshplan.machine._dims import Level as Level
from meshplan.machine._dims import LinkAlgorithm as LinkAlgorithm
from meshplan.machine._dims import LinkDim as LinkDim
from meshplan.machine._links import LinkShare as LinkShare
from meshplan.machine._links import axis_levels as axis_levels
from meshplan.machine._links import legal_mesh_shapes as legal_mesh_shapes
from meshplan.machine._links import link_groups as link_groups
from meshplan.machine._links import spans_levels as spans_levels
from meshplan.machine._machine import Aot as Aot
from meshplan.machine._machine import Machine as Machine
from meshplan.machine._machine import NoAot as NoAot
