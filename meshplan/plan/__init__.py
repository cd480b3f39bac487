"""The plan as data: extraction, search over mesh shapes, codec, difference, explanation."""

from meshplan.plan._data import ArrayPlan as ArrayPlan
from meshplan.plan._data import Candidate as Candidate
from meshplan.plan._data import HeldBytes as HeldBytes
from meshplan.plan._data import OpPlan as OpPlan
from meshplan.plan._data import PlanData as PlanData
from meshplan.plan._extract import Extractor as Extractor
from meshplan.plan._extract import fingerprint as fingerprint
from meshplan.plan._make import plan_data as plan_data
from meshplan.plan._pins import resolve_pins as resolve_pins
from meshplan.plan._search import AXIS_NAMES as AXIS_NAMES
from meshplan.plan._search import Found as Found
from meshplan.plan._search import Search as Search
from meshplan.plan._search import fixed_mesh as fixed_mesh
from meshplan.plan._search import prepare as prepare
