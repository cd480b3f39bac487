"""Sharded embedding tables: two-dimensional groups, planner, runtime, row-wise optimizers, look-ahead cache."""

from meshplan.embedding._table import Collection as Collection
from meshplan.embedding._table import Groups as Groups
from meshplan.embedding._table import Placement as Placement
from meshplan.embedding._table import Shard as Shard
from meshplan.embedding._table import Table as Table
from meshplan.embedding._table import place as place
