"""One `Doc` to terminal text and static HTML; computes nothing."""

from meshplan.report._audit_doc import audit_doc as audit_doc
from meshplan.report._doc import Doc as Doc
from meshplan.report._forecast_doc import forecast_doc as forecast_doc
from meshplan.report._html import html as html
from meshplan.report._other_docs import compare_doc as compare_doc
from meshplan.report._other_docs import diff_doc as diff_doc
from meshplan.report._other_docs import verify_doc as verify_doc
from meshplan.report._plan_doc import plan_doc as plan_doc
from meshplan.report._plan_doc import split_picture as split_picture
from meshplan.report._rich import show as show
from meshplan.report._text import text as text
