"""Pipelines: schedules as tables, stages cut from a step, the runtime, asynchronous weight prediction."""
