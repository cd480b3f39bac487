"""The command line: `meshplan plan|show|explain|diff|audit|verify|compare|solve|machines`."""

from meshplan.cli._main import main as main
