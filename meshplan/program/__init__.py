"""From a step function to flat lists of values and operations."""

from meshplan.program._program import CARRY as CARRY
from meshplan.program._program import CROSSINGS as CROSSINGS
from meshplan.program._program import MERGE as MERGE
from meshplan.program._program import PIN as PIN
from meshplan.program._program import SLICE as SLICE
from meshplan.program._program import STACK as STACK
from meshplan.program._program import Key as Key
from meshplan.program._program import Leaf as Leaf
from meshplan.program._program import Op as Op
from meshplan.program._program import Program as Program
from meshplan.program._program import Region as Region
from meshplan.program._program import Value as Value
from meshplan.program._program import runs_of as runs_of
from meshplan.program._trace import Call as Call
from meshplan.program._trace import trace as trace
