"""A plan into a program: constraints, jit; and what the compiler made of it: audit, verify."""

from meshplan.lower._audit import Audit as Audit
from meshplan.lower._audit import Mismatch as Mismatch
from meshplan.lower._audit import Prediction as Prediction
from meshplan.lower._audit import audit_jitted as audit_jitted
from meshplan.lower._constrain import Constraints as Constraints
from meshplan.lower._constrain import constrained as constrained
from meshplan.lower._lower import jit_planned as jit_planned
from meshplan.lower._lower import planned_function as planned_function
from meshplan.lower._lower import shardings as shardings
from meshplan.lower._lower import unplaced as unplaced
from meshplan.lower._verify import LeafCheck as LeafCheck
from meshplan.lower._verify import Verification as Verification
from meshplan.lower._verify import compare_leaves as compare_leaves
from meshplan.lower._verify import rounded_otherwise as rounded_otherwise
from meshplan.lower._verify import with_noise as with_noise
