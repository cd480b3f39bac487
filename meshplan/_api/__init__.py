"""What users call."""

from meshplan._api._plan import Plan as Plan
from meshplan._api._planning import plan as plan
