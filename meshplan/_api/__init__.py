"""What users call."""

from meshplan._api._compare import Comparison as Comparison
from meshplan._api._compare import compare as compare
from meshplan._api._forecast import Forecast as Forecast
from meshplan._api._forecast import forecast as forecast
from meshplan._api._load import audit as audit
from meshplan._api._load import load as load
from meshplan._api._plan import Plan as Plan
from meshplan._api._planning import plan as plan
from meshplan._api._shard import Sharded as Sharded
from meshplan._api._shard import shard as shard
