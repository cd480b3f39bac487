"""Factor rules: how each primitive's dims may be split."""

from meshplan.rules._bounds import result_bounds as result_bounds
from meshplan.rules._coverage import Coverage as Coverage
from meshplan.rules._coverage import counts as counts
from meshplan.rules._coverage import coverage as coverage
from meshplan.rules._coverage import whole_reason as whole_reason
from meshplan.rules._elementwise import JOINTLY_LINEAR as JOINTLY_LINEAR
from meshplan.rules._elementwise import whole_rule as whole_rule
from meshplan.rules._kernels import fixed_specs as fixed_specs
from meshplan.rules._kernels import rule_names as rule_names
from meshplan.rules._notation import Notation as Notation
from meshplan.rules._notation import parse_rule as parse_rule
from meshplan.rules._rule import Aval as Aval
from meshplan.rules._rule import Bounds as Bounds
from meshplan.rules._rule import Combine as Combine
from meshplan.rules._rule import Dims as Dims
from meshplan.rules._rule import FactorBuilder as FactorBuilder
from meshplan.rules._rule import Fixed as Fixed
from meshplan.rules._rule import Halo as Halo
from meshplan.rules._rule import OpRule as OpRule
from meshplan.rules._rule import OpView as OpView
from meshplan.rules._rule import RuleFn as RuleFn
from meshplan.rules._rule import with_halos as with_halos
from meshplan.rules._table import TABLE as TABLE
from meshplan.rules._table import rule_for as rule_for
