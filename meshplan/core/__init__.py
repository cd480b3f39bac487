"""Specs, mesh shapes, errors, units: words every room shares."""

from meshplan.core._collective import KINDS as KINDS
from meshplan.core._collective import Collective as Collective
from meshplan.core._collective import CollectiveKind as CollectiveKind
from meshplan.core._collective import bytes_by_kind as bytes_by_kind
from meshplan.core._errors import ArgumentError as ArgumentError
from meshplan.core._errors import CompileError as CompileError
from meshplan.core._errors import MachineError as MachineError
from meshplan.core._errors import MemoryLimitError as MemoryLimitError
from meshplan.core._errors import MeshError as MeshError
from meshplan.core._errors import MeshplanError as MeshplanError
from meshplan.core._errors import PinError as PinError
from meshplan.core._errors import PlanFileError as PlanFileError
from meshplan.core._errors import ProblemError as ProblemError
from meshplan.core._errors import SpecError as SpecError
from meshplan.core._errors import TraceError as TraceError
from meshplan.core._errors import nearest as nearest
from meshplan.core._spec import Axes as Axes
from meshplan.core._spec import MeshShape as MeshShape
from meshplan.core._spec import Spec as Spec
from meshplan.core._spec import local_bytes as local_bytes
from meshplan.core._units import GIB as GIB
from meshplan.core._units import KIB as KIB
from meshplan.core._units import MIB as MIB
from meshplan.core._units import format_bytes as format_bytes
from meshplan.core._units import format_flops as format_flops
from meshplan.core._units import format_seconds as format_seconds
