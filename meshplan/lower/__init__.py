"""A plan into a program: constraints, jit; and what the compiler made of it: audit, verify."""

from meshplan.lower._constrain import Constraints as Constraints
from meshplan.lower._constrain import constrained as constrained
from meshplan.lower._lower import jit_planned as jit_planned
from meshplan.lower._lower import planned_function as planned_function
from meshplan.lower._lower import shardings as shardings
